"""Which tokens of a recorded episode its model wrote."""

from __future__ import annotations

import pytest

from grpocli_tools.replay.collection import written_by_model


def row(loss_mask: list[int], logprobs: list[float], turns: int | None) -> dict[str, object]:
    return {"completion_ids": list(range(len(logprobs))), "loss_mask": loss_mask, "logprobs": logprobs, "turns": turns}


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (row([0, 1, 1], [-0.1, 0.0, -0.1], None), [1, 1, 1]),
        (row([1, 1, 0, 1], [-0.1, 0.0, 0.0, 0.0], 2), [1, 1, 0, 1]),
        (row([0] * 5, [-0.1, 0.0, 0.0, -0.1, 0.0], 2), [1, 0, 0, 1, 1]),
        (row([0] * 6, [0.0, -0.1, 0.0, -0.1, 0.0, 0.0], 2), [1, 1, 0, 1, 1, 1]),
        (row([0] * 7, [-0.1, 0.0, -0.1, 0.0, 0.0, 0.0, -0.1], 2), [1, 1, 1, 0, 0, 0, 1]),
        (row([0] * 5, [-0.1, 0.0, -0.1, 0.0, -0.1], 3), [1, 0, 1, 0, 1]),
    ],
    ids=["one turn", "in the update", "outside of it", "certain at the ends", "certain in a turn", "three turns"],
)
def test_the_environments_tokens_are_found(recorded: dict[str, object], expected: list[int]) -> None:
    assert written_by_model(recorded) == expected
