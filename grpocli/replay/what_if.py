"""What another reward, or another algorithm, would have made of a recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpocli.errors import GrpoError
from grpocli.replay.replay import Replay


def other_reward(replay: Replay, step: int, rewards: Mapping[str, Any]) -> dict[str, object]:
    raise GrpoError("not yet")


def other_algorithm(replay: Replay, step: int, algorithm: Any, name: str) -> dict[str, object]:
    raise GrpoError("not yet")
