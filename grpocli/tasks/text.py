"""What a prompt may be: text, or messages."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.tasks.loading import encodable, short
from grpocli.types import Text

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

ROLES = ("system", "user", "assistant", "tool", "developer")


def text_of(example: Example, where: str) -> Text:
    """An example's prompt. Raises ConfigError, saying `where`, if it is none or its loss_multiplier is no number."""
    multiplier = example.get("loss_multiplier", 1.0)
    if isinstance(multiplier, str):  # of a .csv
        with suppress(ValueError):
            multiplier = float(multiplier)
    if not isinstance(multiplier, int | float) or not 0 <= multiplier < math.inf:
        raise ConfigError(f"task: {where} has the loss_multiplier {multiplier!r}; it must be a number of 0 or more")
    prompt = example["prompt"]
    if not all(encodable(text) for text in _texts(prompt)):
        raise ConfigError(f"task: {where} has half a character in its prompt (a surrogate without the other one)")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            if not _is_message(message):
                raise ConfigError(
                    f"task: message {short(message)} of {where} needs a `content` and a `role` of {', '.join(ROLES)}"
                )
        return prompt
    raise ConfigError(f"task: {where} has the prompt {short(prompt)}; it must be text or messages")


def _texts(prompt: object) -> list[str]:
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return [content for content in contents if isinstance(content, str)]


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return message.get("role") in ROLES and isinstance(message.get("content"), str)


def text_hash(text: Text) -> int:
    """The same for equal prompts, within a process."""
    return hash(text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str))
