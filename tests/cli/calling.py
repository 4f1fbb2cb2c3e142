"""Texts for engine=fake: calls of the calculator, right, wrong and none, and answers with its results."""

from __future__ import annotations

from typing import Any


def speak(*, prompt: list[dict[str, Any]], n: int, seed: int, answer: str, **columns: Any) -> list[str]:
    """The first turn calls or answers, by the seed; the second repeats the result."""
    last = prompt[-1]
    if last["role"] == "tool":
        return [last["content"] if last["content"].isdigit() else "none"] * n
    texts = [f"calculator(expression={last['content'].rstrip('=')})", answer, "calculator(number=3)", "7"]
    return [texts[(seed + i) % len(texts)] for i in range(n)]
