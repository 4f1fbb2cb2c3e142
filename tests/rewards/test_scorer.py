"""Scoring with several rewards: a sample that cannot be scored is counted, never scored 0."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest
from rewards.conftest import Scripted, rollouts

from grpocli.errors import RewardError
from grpocli.rewards.reward import Failure, Forfeit, Sample, Score
from grpocli.rewards.scorer import RewardStats, Scorer, ScoreStats
from grpocli.rewards.worker_pool import PoolClosed


def test_a_reward_that_does_not_apply_has_the_score_nan() -> None:
    scorer = Scorer({"size": Scripted(lambda s: len(s.text)), "no": Scripted(lambda s: None)}, 0.0)
    called: list[str] = []
    results, stats = scorer.score(rollouts("a", "bb"), 10, enter=called.append)
    assert called == ["reward.size", "reward.no"]  # the stage in the report of a dead process
    assert [r.rewards["size"] for r in results] == [1.0, 2.0]
    assert all(math.isnan(r.rewards["no"]) for r in results)
    metrics = scorer.metrics(stats, {"size", "no"})
    assert metrics.pop("time/reward") > 0.0
    assert metrics == {"rewards/size/errors": 0, "rewards/no/errors": 0}


@pytest.mark.parametrize("bad", [Failure("lost"), math.nan, math.inf, "one", 10**400, 1e39, [1.0]])
def test_a_value_that_is_not_a_finite_number_is_an_error_not_a_zero(
    bad: Score, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = Scorer({"r": Scripted(lambda s: bad if s.text == "bad" else 1.0)}, 0.5)
    with caplog.at_level(logging.WARNING):
        results, stats = scorer.score(rollouts("good", "bad"), 10)
    assert results[0].rewards == {"r": 1.0}
    assert math.isnan(results[1].rewards["r"])
    assert scorer.metrics(stats, {"r"})["rewards/r/errors"] == 1.0
    assert "reward.r could not score 'bad'" in caplog.text


def test_the_run_stops_above_the_error_limit_and_not_at_it() -> None:
    scorer = Scorer({"r": Scripted(lambda s: Failure("lost") if s.text == "bad" else 0.0)}, 0.5)
    scorer.check_errors(scorer.score(rollouts("good", "bad"), 10)[1])
    _, stats = scorer.score(rollouts("good", "bad", "bad"), 10)
    with pytest.raises(RewardError) as caught:
        scorer.check_errors(stats)
    said = str(caught.value)
    for part in ("reward.r (Scripted)", "2 of 3", "rollout.max_reward_errors=0.5", "lost", "'bad'", "'Why?'"):
        assert part in said
    scorer.check_errors(stats, expected=4)  # half of the whole step may fail


def test_a_sample_that_takes_too_long_to_score_is_wrong_and_not_an_error() -> None:
    """Otherwise a model could avoid a score, and many such samples would stop the run."""
    scorer = Scorer({"r": Scripted(lambda s: Forfeit(-1.0, "it took longer than 5 s"))}, 0.0)
    object.__setattr__(scorer.rewards["r"], "scores_independently", True)
    results, stats = scorer.score(rollouts("a", "b"), 10)
    assert [r.rewards for r in results] == [{"r": -1.0}, {"r": -1.0}]
    assert {type(score) for score in results[0].rewards.values()} == {float}
    metrics = scorer.metrics(stats, {"r"})
    assert (metrics["rewards/r/timeouts"], metrics["rewards/r/errors"]) == (2.0, 0.0)
    assert scorer.metrics(ScoreStats(), {"r"})["rewards/r/timeouts"] == 0.0, "also where a step has scored nothing"
    scorer.check_errors(stats)
    (said,) = scorer.warnings(stats.add_round(stats)).values()
    assert said.startswith("reward.r (Scripted) scored 4 of 4 samples as wrong because scoring them took too long")


def test_stats_add_up_over_rounds_and_processes() -> None:
    def stats(samples: int, seconds: float, errors: int, first: str) -> ScoreStats:
        found = RewardStats(errors=errors, first_error=first)
        return ScoreStats(Counter(sums=samples), seconds, {("r", "sums"): found})

    one, other = stats(2, 1.0, 1, "one"), stats(3, 4.0, 2, "other")
    assert one.add_round(other) == stats(5, 5.0, 3, "one")
    assert one.add_process(other) == stats(5, 4.0, 3, "one")
    assert one.add_process(ScoreStats(Counter(words=1))).samples == {"sums": 2, "words": 1}
    assert ScoreStats().add_round(one) == one


def test_a_pool_that_closes_at_the_end_of_a_run_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    def closed(sample: Sample) -> Score:
        raise PoolClosed("math was ended while it scored")

    with pytest.raises(PoolClosed):
        Scorer({"r": Scripted(closed)}, 0.1).score(rollouts("a"), 10)
    assert not caplog.records


def test_a_completion_of_a_conversation_is_a_message_of_the_assistant() -> None:
    (plain,) = rollouts("Hi")
    (chat,) = rollouts("Hi", prompt=[{"role": "user", "content": "Hello"}], tokens=2, answer="a")
    assert Sample.of(plain, 10).completion == "Hi"
    sample = Sample.of(chat, 10)
    assert sample.completion == [{"role": "assistant", "content": "Hi"}]
    assert (sample.text, sample.n_tokens, sample.max_tokens, sample.columns) == ("Hi", 2, 10, {"answer": "a"})
