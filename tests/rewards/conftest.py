"""Samples for reward tests."""

from __future__ import annotations

from typing import Any

import pytest

from grpocli.rewards.reward import Sample


@pytest.fixture
def sample():
    """A factory of samples: make(text, chat=False, tokens=1, max_tokens=100, **columns)."""

    def make(text: str, *, chat: bool = False, tokens: int = 1, max_tokens: int = 100, **columns: Any) -> Sample:
        prompt = [{"role": "user", "content": "Why?"}] if chat else "Why?"
        completion = [{"role": "assistant", "content": text}] if chat else text
        return Sample(prompt, completion, text, columns, [7] * tokens, max_tokens, truncated=False)

    return make
