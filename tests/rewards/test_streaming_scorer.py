"""Scoring of groups while other groups are still being sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest

from grpocli.progress import Cancelled, Watch
from grpocli.rewards import scorer as scorer_module
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.rewards.scorer import Scorer
from grpocli.training.collector import Sampler
from grpocli.types import Completion, Prompt, Request, Sampling

SOON = 30.0


class FakeTokenizer:
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


class OneProcess:
    rank, size = 0, 1

    def enter(self, name: str) -> None:
        return

    def any(self, flag: bool) -> bool:
        return flag

    def gather_objects(self, own: list[Any]) -> list[Any]:
        return own


class Recording(BaseReward):
    """Scores the first token and fails at 13; records its calls and sets an event at the first one."""

    def __init__(self, scores_independently: bool) -> None:
        object.__setattr__(self, "scores_independently", scores_independently)
        object.__setattr__(self, "calls", [])
        object.__setattr__(self, "called", threading.Event())

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        self.calls.append([s.text for s in samples])  # type: ignore[attr-defined]
        self.called.set()  # type: ignore[attr-defined]
        return [Failure("unlucky") if s.token_ids[0] == 13 else float(s.token_ids[0]) for s in samples]


class Scripted:
    """An engine with two completions for each request. Calls `between` after it has reported the groups in `handed`."""

    def __init__(self, handed: Sequence[int], between: Callable[[], None] = lambda: None) -> None:
        self.handed, self.between = handed, between

    def generate(self, requests: Sequence[Request], sampling: Sampling, each: Any) -> list[list[Completion]]:
        found = [
            [Completion([10 + request.token_ids[0] + k], [-1.0], "stop", 1) for k in range(2)] for request in requests
        ]
        for k in self.handed:
            each(k, found[k])
        self.between()
        return found


def sampler(engine: Any, rewards: dict[str, BaseReward]) -> Sampler:
    return Sampler(OneProcess(), engine, FakeTokenizer(), Scorer(rewards, 1.0))  # type: ignore[arg-type]


PROMPTS = [Prompt(str(i), [2 * i], "?") for i in range(3)]


def test_a_group_is_scored_while_others_are_still_being_sampled() -> None:
    alone, together = Recording(True), Recording(False)

    def wait() -> None:
        assert alone.called.wait(SOON)  # type: ignore[attr-defined]
        assert not together.calls  # type: ignore[attr-defined]

    groups, stats = sampler(Scripted([2, 0], wait), {"alone": alone, "together": together}).generate_and_score(
        PROMPTS, [0, 1, 2], 2, Sampling(4)
    )
    assert list(chain(*alone.calls)) == ["14", "15", "10", "11", "12", "13"]  # type: ignore[attr-defined]
    assert alone.calls[-1] == ["12", "13"]  # type: ignore[attr-defined]
    assert together.calls == [["10", "11", "12", "13", "14", "15"]]  # type: ignore[attr-defined]
    assert [r.rewards["alone"] for g in groups for r in g.rollouts][:3] == [10.0, 11.0, 12.0]
    assert stats.samples.total() == 6
    assert {name: one.errors for (name, _), one in stats.rewards.items()} == {"alone": 1, "together": 1}


def test_scores_do_not_depend_on_when_groups_arrive() -> None:
    found = []
    for handed in ([], [0], [1, 2], [2, 1, 0]):
        groups, stats = sampler(Scripted(handed), {"r": Recording(True)}).generate_and_score(
            PROMPTS, [0, 1, 2], 2, Sampling(4)
        )
        found.append(([repr(r) for g in groups for r in g.rollouts], stats.samples, stats.rewards))
    assert all(one == found[0] for one in found)
    assert found[0][2]["r", ""].errors == 1


def test_an_engine_that_fails_does_not_wait_for_scores() -> None:
    """It waits for no running call, and waiting groups are not scored."""
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()
    calls: list[int] = []

    class Slow(BaseReward):
        scores_independently = True

        def __call__(self, samples: Sequence[Sample]) -> list[Score]:
            calls.append(len(samples))
            begun.set()
            assert go_on.wait(SOON)
            over.set()
            return [0.0] * len(samples)

    class Fails(Scripted):
        def generate(self, requests: Sequence[Request], sampling: Sampling, each: Any) -> list[list[Completion]]:
            for k in range(3):
                each(k, [Completion([10], [-1.0], "stop", 1)] * 2)
                assert begun.wait(SOON)  # so that the first group is scored alone
            raise RuntimeError("the engine broke")

    with pytest.raises(RuntimeError, match="the engine broke"):
        sampler(Fails([]), {"slow": Slow()}).generate_and_score(PROMPTS, [0, 1, 2], 2, Sampling(4))
    assert not over.is_set()
    go_on.set()
    assert over.wait(SOON)
    assert calls == [2]


def test_all_processes_stop_if_one_was_cancelled() -> None:
    """This process has all its completions when another one is asked to stop, and scores nothing."""

    class Two(OneProcess):
        def any(self, flag: bool) -> bool:
            return True

    reward = Recording(False)
    cancelled = Sampler(Two(), Scripted([]), FakeTokenizer(), Scorer({"r": reward}, 1.0))  # type: ignore[arg-type]
    with pytest.raises(Cancelled):
        cancelled.generate_and_score(PROMPTS, [0, 1, 2], 2, Sampling(4), Watch(cancelled=lambda: False))
    assert reward.calls == []  # type: ignore[attr-defined]


def test_progress_counts_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward with worker processes is called in batches, and another one once with all samples."""
    monkeypatch.setattr(scorer_module, "BATCH", 4)
    reports: list[tuple[float, float, str]] = []
    watch = Watch(lambda done, total, unit, detail="": reports.append((done, total, unit)))
    alone, together = Recording(True), Recording(False)
    sampler(Scripted([]), {"alone": alone, "all": together}).generate_and_score(
        PROMPTS, [0, 1, 2], 2, Sampling(4), watch
    )
    assert [len(call) for call in alone.calls] == [4, 2]  # type: ignore[attr-defined]
    assert [len(call) for call in together.calls] == [6]  # type: ignore[attr-defined]
    assert reports == [
        (0, 6, "scores of reward.alone"),
        (4, 6, "scores of reward.alone"),
        (0, 6, "scores of reward.all"),
    ]
