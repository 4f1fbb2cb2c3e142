"""Scoring with several rewards: what could not be scored is counted, never a 0."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from grpocli.errors import RewardError
from grpocli.rewards.pool import PoolClosed
from grpocli.rewards.reward import BaseReward, Failure, Forfeit, Sample, Score
from grpocli.rewards.scoring import Limit, Scorer, Tally, sample_of
from grpocli.types import Completion, Prompt, Rollout


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
    called: list[str] = []
    results, tally = scorer.score(rollouts("a", "bb"), 10, enter=called.append)
    assert called == ["reward.size", "reward.no"]  # for who must say where a process has ended
    assert [r["size"] for r in results] == [1.0, 2.0]
    assert all(math.isnan(r["no"]) for r in results)
    assert tally.metrics | {"time/reward": 0} == {"time/reward": 0, "rewards/size/errors": 0, "rewards/no/errors": 0}
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
    scorer.check_errors(scorer.score(rollouts("good", "bad"), 10)[1])
    _, tally = scorer.score(rollouts("good", "bad", "bad"), 10)
    with pytest.raises(RewardError) as caught:
        scorer.check_errors(tally)
    said = str(caught.value)
    for part in ("reward.r (Scripted)", "2 of 3", "rollout.max_reward_errors=0.5", "lost", "'bad'", "'Why?'"):
        assert part in said
    scorer.check_errors(tally, expected=4)  # the step goes on: half of it may fail


def test_what_takes_too_long_to_score_is_wrong_counted_and_no_error() -> None:
    """Or a model could choose to have no score, and many of them would stop the run."""
    scorer = Scorer({"r": Scripted(lambda s: Forfeit(-1.0, "it took longer than 5 s"))}, 0.0)
    object.__setattr__(scorer.rewards["r"], "has_processes", True)
    results, tally = scorer.score(rollouts("a", "b"), 10)
    assert results == [{"r": -1.0}, {"r": -1.0}]
    assert {type(score) for score in results[0].values()} == {float}
    assert (tally.metrics["rewards/r/timeouts"], tally.metrics["rewards/r/errors"]) == (2.0, 0.0)
    scorer.check_errors(tally)
    (said,) = scorer.remarks(tally.then(tally)).values()
    assert said.startswith("reward.r (Scripted) scored 4 of 4 samples as wrong because scoring them took too long")


def test_tallies_add_up_over_rounds_and_over_processes() -> None:
    def tally(samples: int, seconds: float, errors: int, first: str) -> Tally:
        pair = ("r", "sums")
        return Tally(Counter(sums=samples), seconds, Counter({pair: errors}), {pair: first}, Counter({pair: 0}))

    one, other = tally(2, 1.0, 1, "one"), tally(3, 4.0, 2, "other")
    assert one.then(other) == tally(5, 5.0, 3, "one")
    assert one.beside(other) == tally(5, 4.0, 3, "one")
    assert one.beside(Tally(Counter(words=1))).samples == {"sums": 2, "words": 1}
    assert Tally().then(one) == one


def test_an_exception_fails_every_sample_and_names_itself() -> None:
    def broken(sample: Sample) -> Score:
        raise KeyError("task")

    scorer = Scorer({"r": Scripted(broken)}, 0.1)
    with pytest.raises(RewardError, match=r"could not score 2 of 2 .* it raised KeyError: 'task'"):
        scorer.check_errors(scorer.score(rollouts("a", "b"), 10)[1])


def test_a_reward_changes_its_own_copy_alone() -> None:
    def spoil(sample: Sample) -> Score:
        assert isinstance(sample.prompt, list)
        sample.prompt[0]["content"] = "hacked"
        sample.columns["answer"] = "hacked"
        sample.token_ids.clear()
        return 1.0

    given = rollouts("a", prompt=[{"role": "user", "content": "Why?"}])
    seen: list[Sample] = []
    after = Scripted(lambda sample: seen.append(sample) or 0.0)
    Scorer({"r": Scripted(spoil), "s": after}, 0.1).score(given, 10)
    for prompt, answer, ids in (
        (given[0].prompt.text, given[0].prompt.columns["answer"], given[0].completion.token_ids),
        (seen[0].prompt, seen[0].columns["answer"], seen[0].token_ids),
    ):
        assert (prompt, answer, ids) == ([{"role": "user", "content": "Why?"}], "a", [5, 6])


def test_a_pool_that_the_end_of_a_run_closes_is_no_failure_of_a_reward(caplog: pytest.LogCaptureFixture) -> None:
    def closed(sample: Sample) -> Score:
        raise PoolClosed("math was ended while it scored")

    with pytest.raises(PoolClosed):
        Scorer({"r": Scripted(closed)}, 0.1).score(rollouts("a"), 10)
    assert not caplog.records


def test_a_process_without_a_share_scores_nothing() -> None:
    scorer = Scorer({"r": Scripted(lambda s: 1.0)}, 0.0)
    results, tally = scorer.score([], 10)
    assert results == []
    scorer.check_errors(tally)


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


def test_a_task_with_a_limit_of_its_own_does_not_stop_the_others() -> None:
    def of(task: str, *texts: str) -> list[Rollout]:
        return [replace(one, prompt=Prompt("0", [1], "Why?", {"task_name": task})) for one in rollouts(*texts)]

    reward = Scripted(lambda s: Failure("lost") if s.text == "bad" else 0.0)
    samples = [*of("good", "a", "b"), *of("odd", "bad", "bad")]
    tolerant = Scorer({"r": reward}, 0.1, limits={"odd": Limit("task.odd.max_reward_errors", 1.0)})
    _, tally = tolerant.score(samples, 10)
    tolerant.check_errors(tally)
    assert (tally.errors_of("good"), tally.errors_of("odd"), tally.metrics["rewards/r/errors"]) == (0, 2, 2.0)
    (said,) = tolerant.remarks(tally).values()
    assert said == (
        "reward.r (Scripted) could not score 2 of 2 samples of task odd, which task.odd.max_reward_errors=1 allows: "
        "lost; the first was the completion 'bad' of 'Why?' (task odd)"
    )
    with pytest.raises(RewardError, match=r"2 of 4 samples, more than rollout\.max_reward_errors=0\.1 .* \(task odd\)"):
        Scorer({"r": reward}, 0.1).check_errors(tally)
    strict = Scorer({"r": reward}, 1.0, limits={"odd": Limit("task.odd.max_reward_errors", 0.5)})
    with pytest.raises(RewardError, match=r"2 of 2 samples, more than task\.odd\.max_reward_errors=0\.5 allows"):
        strict.check_errors(tally)
    strict.check_errors(tally, expected=8)  # four of the task's will be there


def test_the_others_are_still_held_to_the_limit_of_the_run() -> None:
    limits = {"": Limit("task.odd.max_reward_errors", 1.0)}
    bad = [replace(one, prompt=Prompt("0", [1], "?", {"task_name": "good"})) for one in rollouts("bad")]
    scorer = Scorer({"r": Scripted(lambda s: Failure("lost"))}, 0.5, limits=limits)
    with pytest.raises(RewardError, match=r"1 of 1 samples, more than rollout\.max_reward_errors=0\.5"):
        scorer.check_errors(scorer.score([*rollouts("bad", "bad"), *bad], 10)[1])
