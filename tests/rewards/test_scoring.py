"""Scoring with several rewards: what could not be scored is counted, never a 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import pytest

from grpocli.data import Completion, Prompt, Rollout
from grpocli.errors import RewardError
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.rewards.scoring import Scorer, Tally, sample_of


class Scripted(BaseReward):
    def __init__(self, script: Callable[[Sample], Score]) -> None:
        object.__setattr__(self, "script", script)
        object.__setattr__(self, "closed", [])

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        return [self.script(sample) for sample in samples]  # type: ignore[attr-defined]

    def close(self) -> None:
        self.closed.append(True)  # type: ignore[attr-defined]


def rollouts(*texts: str, prompt: object = "Why?") -> list[Rollout]:
    return [
        Rollout(Prompt("0", [1], prompt, {"answer": "a"}), Completion([5, 6], [0.0, 0.0], "stop", 0), text)  # type: ignore[arg-type]
        for text in texts
    ]


def test_rewards_by_name_with_nan_where_one_does_not_apply() -> None:
    scorer = Scorer({"size": Scripted(lambda s: len(s.text)), "no": Scripted(lambda s: None)}, 0.0)
    results, tally = scorer.score(rollouts("a", "bb"), 10)
    assert [r["size"] for r in results] == [1.0, 2.0]
    assert all(math.isnan(r["no"]) for r in results)
    assert tally.errors == {"size": 0, "no": 0}
    assert tally.metrics["time/reward"] > 0.0


@pytest.mark.parametrize("bad", [Failure("lost"), math.nan, math.inf, "one", 10**400, 1e39, [1.0]])
def test_what_is_no_finite_number_is_an_error_and_no_zero(bad: Score, caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer({"r": Scripted(lambda s: bad if s.text == "bad" else 1.0)}, 0.5)
    with caplog.at_level(logging.WARNING):
        results, tally = scorer.score(rollouts("good", "bad"), 10)
    assert results[0] == {"r": 1.0}
    assert math.isnan(results[1]["r"])
    assert tally.metrics["rewards/r/errors"] == 1.0
    assert "reward.r could not score 'bad'" in caplog.text


def test_the_run_stops_above_the_share_and_not_at_it() -> None:
    scorer = Scorer({"r": Scripted(lambda s: Failure("lost") if s.text == "bad" else 0.0)}, 0.5)
    scorer.judge(scorer.score(rollouts("good", "bad"), 10)[1])
    _, tally = scorer.score(rollouts("good", "bad", "bad"), 10)
    with pytest.raises(RewardError) as caught:
        scorer.judge(tally)
    said = str(caught.value)
    for part in ("reward.r (Scripted)", "2 of 3", "rollout.max_reward_errors=0.5", "lost", "'bad'", "'Why?'"):
        assert part in said
    scorer.judge(tally, expected=4)  # the step goes on: half of it may fail


def test_tallies_add_up_over_rounds_and_over_processes() -> None:
    one, other = Tally(2, 1.0, {"r": 1}, {"r": "one"}), Tally(3, 4.0, {"r": 2}, {"r": "other"})
    assert one.then(other) == Tally(5, 5.0, {"r": 3}, {"r": "one"})
    assert one.beside(other) == Tally(5, 4.0, {"r": 3}, {"r": "one"})
    assert Tally().then(one) == one


def test_an_exception_fails_every_sample_and_names_itself() -> None:
    def broken(sample: Sample) -> Score:
        raise KeyError("task")

    scorer = Scorer({"r": Scripted(broken)}, 0.1)
    with pytest.raises(RewardError, match=r"could not score 2 of 2 .* it raised KeyError: 'task'"):
        scorer.judge(scorer.score(rollouts("a", "b"), 10)[1])


def test_a_process_without_a_share_scores_nothing() -> None:
    scorer = Scorer({"r": Scripted(lambda s: 1.0)}, 0.0)
    results, tally = scorer.score([], 10)
    assert results == []
    scorer.judge(tally)


def test_a_conversation_is_answered_by_the_assistant() -> None:
    (plain,) = rollouts("Hi")
    (chat,) = rollouts("Hi", prompt=[{"role": "user", "content": "Hello"}])
    assert sample_of(plain, 10).completion == "Hi"
    sample = sample_of(chat, 10)
    assert sample.completion == [{"role": "assistant", "content": "Hi"}]
    assert (sample.text, sample.n_tokens, sample.max_tokens, sample.columns) == ("Hi", 2, 10, {"answer": "a"})


def test_close_closes_all() -> None:
    rewards = {"a": Scripted(lambda s: 1.0), "b": Scripted(lambda s: 1.0)}
    Scorer(dict(rewards), 0.0).close()
    assert [r.closed for r in rewards.values()] == [[True], [True]]  # type: ignore[attr-defined]
