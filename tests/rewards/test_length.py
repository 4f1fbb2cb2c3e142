"""Rewards of a completion's length: overlong, length_penalty and kimi_length."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards.length import GroupLength, KimiLength, LengthPenalty, Overlong
from grpocli.rewards.reward import Sample


def test_overlong_is_the_papers_equation_13(sample) -> None:
    """L_max = 20480 and L_cache = 4096; the score is -1 beyond the limit."""
    reward = Overlong(max_tokens=20480, buffer_tokens=4096)
    lengths = [0, 16384, 16384 + 1024, 20480 - 1, 20480, 20481, 40000]
    expected = [0.0, 0.0, -0.25, (16384 - 20479) / 4096, -1.0, -1.0, -1.0]
    assert reward([sample("x", tokens=n) for n in lengths]) == expected


def test_overlong_defaults_to_the_samples_limit_and_a_fifth_of_it(sample) -> None:
    lengths = [80, 90, 100]
    assert Overlong()([sample("x", tokens=n, max_tokens=100) for n in lengths]) == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"max_tokens": 10, "buffer_tokens": 11}, "reward.overlong.buffer_tokens=11"),
        ({"max_tokens": 0}, "reward.overlong.max_tokens=0"),
        ({"buffer_tokens": 0}, "reward.overlong.buffer_tokens=0"),
        ({"weight": float("nan")}, "reward.overlong.weight=nan"),
    ],
)
def test_overlong_refuses_contradictory_limits(fields: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Overlong(**fields)  # type: ignore[arg-type]


def of_length(length: int, scores: dict[str, float | None], mask: list[int] | None = None) -> Sample:
    return Sample("?", "", "", {}, [7] * length, 100, truncated=False, mask=mask, scores=scores)


def scored(reward: GroupLength, lengths: Sequence[int], right: Sequence[float | None], name: str = "right") -> Any:
    return reward([of_length(length, {name: one}) for length, one in zip(lengths, right, strict=True)])


def test_length_penalty_is_prime_rls_term_of_output_tokens() -> None:
    """prime-rl subtracts weight * mean reward * (tokens / the group's most tokens) from each reward of 0 or 1."""
    random_ = random.Random(0)
    for _ in range(50):
        size = random_.randint(1, 9)
        lengths = [random_.randint(0, 40) for _ in range(size)]
        right = [float(random_.random() < 0.6) for _ in range(size)]
        mean, most = sum(right) / size, max(1, *lengths, 1)
        assert scored(LengthPenalty(), lengths, right) == pytest.approx([-mean * n / most for n in lengths], abs=1e-15)
    assert LengthPenalty().weight == 0.25
    assert [math.copysign(1, score) for score in scored(LengthPenalty(), [3, 4], [0.0, 0.0])] == [1.0, 1.0]


def test_kimi_length_is_the_papers_formula() -> None:
    lengths, right = [10, 20, 30, 20], [1.0, 1.0, 0.0, 0.0]
    assert scored(KimiLength(), lengths, right) == [0.5, 0.0, -0.5, 0.0]
    assert scored(KimiLength(), [10, 30, 12], [0.0, 0.0, 1.0]) == [0.0, -0.5, pytest.approx(0.4)]
    assert scored(KimiLength(), [5, 5, 5], right[:3]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [LengthPenalty(), KimiLength()])
def test_a_completion_without_a_known_accuracy_gets_no_score_and_changes_no_other(reward: GroupLength) -> None:
    alone = scored(reward, [10, 20, 30], [1.0, 0.0, 1.0])
    assert scored(reward, [10, 99, 20, 30], [1.0, None, 0.0, 1.0]) == [alone[0], None, *alone[1:]]
    assert scored(reward, [10, 20], [None, None]) == [None, None]
    assert len(scored(reward, [10], [1.0])) == 1, "a greedy answer is a group of one"


def test_an_environments_tokens_do_not_count() -> None:
    given = [of_length(4, {"right": 1.0}, mask) for mask in ([1, 0, 0, 1], None)]
    assert LengthPenalty()(given) == [-0.5, -1.0]


def test_the_accuracy_is_that_of_evaluations() -> None:
    """`eval.reward` if it scores the task, else the task's first reward; a score of 1 or more is right."""
    sample = of_length(1, {"first": 0.5, "second": 2.0})
    assert LengthPenalty()([sample]) == [0.0]
    assert LengthPenalty(reward="second")([sample]) == [-1.0]
    assert LengthPenalty(reward="other_task")([sample]) == [0.0]
