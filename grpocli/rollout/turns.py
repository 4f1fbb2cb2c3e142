"""An environment's words as tokens: what a chat template puts between two turns of the model, once and for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPOKEN = "grpocli-turn"
"""Stands for the model's words: these stay the tokens that were sampled, and are never written again."""


class Turns:
    """With the chat template of `tokenizer`, or as plain text where the prompts are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def after(self, sampled: Sequence[int], observation: Sequence[Message], chat: bool) -> list[int]:
        """The tokens from the end of a turn of the model's, `sampled`, to the beginning of its next one.

        The template's end of a turn is left out where the model has sampled it. Raises ConfigError where the template
        cannot show these messages.
        """
        text = self._between(observation) if chat else "".join(message["content"] for message in observation)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False).input_ids
        if chat and ids and sampled and ids[0] == sampled[-1]:
            return ids[1:]
        return ids

    def _between(self, observation: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        spoken: list[Any] = [{"role": "user", "content": "."}, {"role": "assistant", "content": SPOKEN}]
        try:
            text = str(
                self.tokenizer.apply_chat_template([*spoken, *observation], tokenize=False, add_generation_prompt=True)
            )
        except (TemplateError, ValueError) as error:
            raise ConfigError(f"model: its chat template refuses what an environment says: {error}") from error
        _, found, after = text.partition(SPOKEN)  # the first one: an environment may say it too
        if not found:
            raise ConfigError(
                "model: its chat template leaves out what the model has said before an environment's words"
            )
        return after
