"""The reward overlong."""

from __future__ import annotations

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards.length import Overlong


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
