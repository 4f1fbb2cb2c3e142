"""Rewards that see the group: what they get, when they are called, and the two length rewards."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rewards.conftest import Scripted as Each
from rewards.conftest import rollouts
from rewards.test_streaming_scorer import PROMPTS, Recording, Scripted, sampler

from grpocli.config.user_code import load
from grpocli.errors import ConfigError
from grpocli.rewards.python import PythonReward
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.rewards.scorer import Scorer
from grpocli.types import Completion, Episode, Rollout, Sampling

Seen = list[tuple[list[str], list[Mapping[str, float | None]]]]


class Whole(BaseReward):
    """Scores a group by `script`; `seen` has the texts and scores of each call."""

    sees_group = True

    def __init__(self, script: Callable[[Sequence[Sample]], list[Score]] | None = None) -> None:
        object.__setattr__(self, "script", script)
        object.__setattr__(self, "seen", [])

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        self.seen.append(([s.text for s in samples], [dict(s.scores) for s in samples]))  # type: ignore[attr-defined]
        script = self.script  # type: ignore[attr-defined]
        return script(samples) if script else [float(len(samples))] * len(samples)


def group(uid: str, *texts: str, **columns: Any) -> list[Rollout]:
    return rollouts(*texts, uid=uid, **columns)


def test_it_is_called_for_each_group_after_the_others_with_their_scores() -> None:
    whole, second = Whole(), Whole()
    silent = Each(lambda s: None if s.text == "b" else Failure("lost") if s.text == "c" else 2.0)
    rewards = {"whole": whole, "size": Each(lambda s: len(s.text)), "second": second, "silent": silent}
    entered: list[str] = []
    results, stats = Scorer(rewards, 1.0).score([*group("0", "a", "b"), *group("1", "c")], 10, enter=entered.append)
    expected: Seen = [
        (["a", "b"], [{"size": 1.0, "silent": 2.0}, {"size": 1.0, "silent": None}]),
        (["c"], [{"size": 1.0, "silent": None}]),
    ]
    assert (whole.seen, second.seen) == (expected, expected)  # type: ignore[attr-defined]
    assert entered == ["reward.size", "reward.silent", "reward.whole", "reward.second"]
    assert [one.rewards["whole"] for one in results] == [2.0, 2.0, 1.0]
    assert list(results[0].rewards) == list(rewards)
    assert stats.of("silent", "").errors == 1


def test_it_gets_only_the_rewards_of_its_task_in_their_order_and_no_failed_episode() -> None:
    whole = Whole()
    rewards = {"a": Each(lambda s: 1.0), "b": Each(lambda s: 2.0), "whole": whole}
    scorer = Scorer(rewards, 1.0, tasks={"x": ["b", "a", "whole"], "y": ["a"], "z": ["whole", "b"]})
    broken = Completion(
        [1], [0.0], "stop", 0, episode=Episode([{"role": "assistant", "content": "two"}], 1, {}, problem="it broke")
    )
    x, y, z = (group(name, "one", "two", task_name=name) for name in "xyz")
    x[1] = Rollout(x[1].prompt, broken, "two")
    results, stats = scorer.score([*x, *y, *z], 10)
    seen: Seen = whole.seen  # type: ignore[attr-defined]
    assert seen == [(["one"], [{"b": 2.0, "a": 1.0}]), (["one", "two"], [{"b": 2.0}] * 2)]
    assert list(seen[0][1][0]) == ["b", "a"]
    assert all(math.isnan(one.rewards["whole"]) for one in results if one.prompt.task == "y")
    assert stats.of("whole", "x").errors == 1


def test_an_error_in_one_group_fails_only_that_group() -> None:
    def picky(samples: Sequence[Sample]) -> list[Score]:
        if samples[0].text == "bad":
            raise ValueError("no")
        return [1.0] * len(samples)

    results, stats = Scorer({"whole": Whole(picky)}, 1.0).score([*group("0", "bad", "x"), *group("1", "ok")], 10)
    assert (stats.of("whole", "").errors, results[2].rewards["whole"]) == (2, 1.0)


def test_groups_that_arrive_early_wait_for_the_scores_of_all_rewards() -> None:
    """A reward that would score alone is also called at the end."""

    class Alone(Whole):
        scores_independently = True

    found = []
    for handed in ([], [2, 0]):
        whole = Alone(lambda samples: [sum(v or 0.0 for v in s.scores.values()) for s in samples])
        rewards = {"whole": whole, "early": Recording(True), "late": Recording(False)}
        groups, _ = sampler(Scripted(handed), rewards).generate_and_score(PROMPTS, [0, 1, 2], 2, Sampling(4))
        found.append([r.rewards["whole"] for g in groups for r in g.rollouts])
        assert len(whole.seen) == 3  # type: ignore[attr-defined]
    assert found[0] == found[1] == [20.0, 22.0, 24.0, 0.0, 28.0, 30.0]


def test_its_random_numbers_depend_on_its_group_alone() -> None:
    """So a resumed run repeats them, with any number of processes."""

    def drawn(*groups: list[Rollout]) -> list[float]:
        scorer = Scorer({"whole": Whole(lambda samples: [random.random() for _ in samples])}, 0.0)
        return [one.rewards["whole"] for one in scorer.score([r for g in groups for r in g], 10)[0]]

    first, second = group("0", "a", "b", tokens=2), group("1", "c", "d", tokens=3)
    assert drawn(first, second) == [*drawn(first), *drawn(second)]


# Functions of the user

SOURCE = """
def best(completions, scores, **columns):
    assert columns["answer"] and len(completions) == 2
    most = max(one or 0.0 for one in scores["size"])
    return [most - (one or 0.0) for one in scores["size"]]

def maybe(completions, scores=None):
    return [0.0 if scores is None else 1.0 for one in completions]

def plain(completions):
    return [float(len(completions))] * len(completions)
"""


@pytest.fixture
def function(tmp_path: Path) -> Callable[..., PythonReward]:
    (tmp_path / "mine.py").write_text(SOURCE)
    return lambda name, **fields: PythonReward(function=f"{tmp_path}/mine.py:{name}", **{"process": False, **fields})


def test_a_function_is_called_for_each_group_and_may_take_the_scores(function: Callable[..., PythonReward]) -> None:
    groups = [*group("0", "a", "bbb", answer="1"), *group("1", "cc", "c", answer="1")]
    size = Each(lambda s: len(s.text))
    for options in ({}, {"process": True}):
        best = function("best", per_group=True, **options)
        plain = function("plain", per_group=True)
        with closing(best):
            results, stats = Scorer({"size": size, "best": best, "plain": plain}, 0.0).score(groups, 10)
        assert [one.rewards["best"] for one in results] == [2.0, 0.0, 0.0, 1.0], stats
        assert [one.rewards["plain"] for one in results] == [2.0] * 4
    assert function("plain").sees_group is False


def test_a_function_that_takes_the_scores_needs_a_call_for_each_group(function: Callable[..., PythonReward]) -> None:
    for name in ("best", "maybe"):
        function(name, per_group=True).check(["answer"])
        with pytest.raises(ConfigError, match="takes 'scores', which only a call for each group passes") as caught:
            function(name).check(["answer"])
        assert "set reward.python.per_group=true" in str(caught.value)
        function(name).check(["answer", "scores"])  # a column, as in TRL


def test_the_example_of_the_docs_runs_here_and_in_trl(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    begin = page.index("    from difflib import SequenceMatcher")
    source = page[begin : page.index("<!-- -->", begin)]
    path = tmp_path / "diversity.py"
    path.write_text("\n".join(line[4:] for line in source.splitlines()))
    reward = PythonReward(function=f"{path}:diversity", per_group=True, process=False)
    reward.check(["answer"])
    right = Each(lambda s: float("wrong" not in s.text))
    texts = [*group("0", "2+2=4", "2+2=4", "four", "wrong"), *group("1", "alone", "wrong")]
    results, _ = Scorer({"right": right, "diversity": reward}, 0.0).score(texts, 10)
    found = [one.rewards["diversity"] for one in results]
    assert found == [0.5, 0.5, 1.0, 0.0, 0.0, 0.0]
    called = load(reward.function, "reward")
    chat = [[{"role": "assistant", "content": one.text}] for one in texts]
    prompts = [one.prompt.uid for one in texts]
    in_trl = called(prompts=prompts, completions=chat, completion_ids=[], answer=[], trainer_state=None)
    assert in_trl[:3] == [pytest.approx(value) for value in (in_trl[0], in_trl[0], in_trl[2])]
    assert in_trl[2] > in_trl[0] > 0
