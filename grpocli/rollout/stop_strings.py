"""Stop strings: a completion ends with the first token whose text completes one of them, as vLLM decides it.

Text is decoded as it grows, with the prompt before it, since what a token says depends on its neighbours (a space at
a word's start, the bytes of a character). Special tokens are no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 6  # tokens of the prompt that may change how the completion's first ones are decoded
UNFINISHED = "\ufffd"  # what the first bytes of a character are decoded to


class StopStrings:
    """Watches the growing text of one completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self.tokenizer, self.stop = tokenizer, list(stop)
        self._ids = list(prompt_ids[-CONTEXT:])
        self._said = self._decode()  # what is already part of the text, of the tokens kept for context
        self._new = len(self._ids)  # where the tokens begin that have not become text
        self._tail = ""
        self._reach = (
            max(map(len, stop), default=1) - 1
        )  # characters before the new ones that a stop string may begin with

    def completed_by(self, token: int) -> bool:
        """Add the next token; whether its text completes a stop string."""
        self._ids.append(token)
        text = self._decode()
        if len(text) <= len(self._said) or text.endswith(UNFINISHED):
            return False
        grown = self._tail + text[len(self._said) :]
        self._ids, self._new = self._ids[self._new :], len(self._ids) - self._new
        self._said = self._decode()
        self._tail = grown[-self._reach :] if self._reach else ""
        return any(stop in grown for stop in self.stop)

    def _decode(self) -> str:
        text: str = self.tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )  # as vLLM does
        return text
