"""Environments for tests, run in worker processes."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any


class Counting:
    """Replies with the number of turns and rewards each with 1; the episode ends after the example's `turns`."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return {"turn": 0, "last": metadata.get("turns", self.turns)}

    def step(self, messages: list[dict[str, str]], metadata: dict[str, Any]) -> Any:
        turn = metadata["turn"] + 1
        assert [m["role"] for m in messages] == ["user", "assistant"] * turn, messages
        observation = [{"role": "user", "content": f"turn {turn}"}]
        return (
            observation,
            {"each": 1.0, "length": len(messages[-1]["content"])},
            turn >= metadata["last"],
            metadata | {"turn": turn},
        )


class Broken:
    """Misbehaves as the example's column `how` says."""

    def reset(self, metadata: dict[str, Any]) -> Any:
        if metadata["how"] == "reset":
            raise RuntimeError("no such episode")
        if metadata["how"].endswith("_KEY"):
            return metadata | {"key": os.environ[metadata["how"]]}
        return metadata

    def step(self, messages: list[dict[str, str]], metadata: dict[str, Any]) -> Any:
        how = metadata["how"]
        if how == "raise":
            raise RuntimeError("lost the board")
        if how == "hang":
            time.sleep(60)
        if how == "regex":  # keeps the interpreter's lock
            re.match("(a+)+$", "a" * 60 + "b")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        answers = {
            "shape": 5,
            "role": ([{"role": "assistant", "content": "x"}], 0.0, False, {}),
            "message": (["x"], 0.0, False, {}),
            "number": ([], float("nan"), True, {}),
            "metadata": ([], 0.0, True, {"set": {1}}),
            "long": ([{"role": "user", "content": "x" * 300_000}], 0.0, False, {}),
            "fine": ([], 1.0, True, {}),
        }
        return answers[how]


class Retry:
    """Repeats an arithmetic problem until the answer is right; an earlier answer has a larger reward."""

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return {"answer": metadata["answer"], "turn": 0}

    def step(self, messages: list[dict[str, str]], metadata: dict[str, Any]) -> Any:
        turn = metadata["turn"] + 1
        if messages[-1]["content"] == metadata["answer"]:
            return [], 1.0 if turn == 1 else 0.5, True, metadata
        return [messages[0]], 0.0, turn == 3, metadata | {"turn": turn}
