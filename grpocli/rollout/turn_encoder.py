"""Tokens between a turn of the model and its next one: an environment's messages, with the chat template's markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.models.chat_template import control_pattern, control_tokens
from grpocli.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "grpocli-turn"
"""Stands in for the model's turn when the chat template is rendered, because sampled tokens are never encoded again."""
CONTENT = "grpocli-content-{}-"
"""Stands in for the content of a message."""
SPLIT = re.compile(r"grpocli-content-(\d+)-")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered text: markers of the template, or the content of a message, which is only data."""

    text: str
    is_content: bool = False


@dataclass(frozen=True, eq=False)
class TurnEncoder:
    """Encodes an environment's messages with the chat template of `tokenizer`, or as plain text after plain prompts.

    tools: schemas for the chat template. In a conversation, text in a message never becomes a control token, whatever
    it says.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] = ()

    def encode_observation(self, sampled: Sequence[int], observation: Sequence[Message], chat: bool) -> list[int]:
        """The tokens between a turn of the model, `sampled`, and its next one.

        If the model already sampled the template's end-of-turn token, it is not repeated. Raises ConfigError if the
        template cannot render these messages.
        """
        if not chat:
            return self._encode("".join(message["content"] for message in observation))
        pieces = self._pieces(sampled, observation)
        ids = self._encode_pieces(pieces)
        return ids[1:] if ids and sampled and ids[0] == sampled[-1] else ids

    @cached_property
    def generation_prompt(self) -> str:
        """The template's text that begins a turn of the model."""
        turn = [{"role": "user", "content": "."}]
        before, after = self.render(turn), self.render(turn, add_generation_prompt=True)
        return after.removeprefix(before) if after.startswith(before) else ""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of a conversation."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(self.tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def cut(self, text: str, tokens: int) -> str:
        """The text, without what follows its first `tokens` tokens."""
        ids = self._encode_content(text)
        if len(ids) <= tokens:
            return text
        return f"{self.tokenizer.decode(ids[:tokens])}\n[cut after {tokens} tokens]"

    def _pieces(self, sampled: Sequence[int], observation: Sequence[Message]) -> list[Piece]:
        """The rendered messages. Many templates write a tool's message by itself, some only after its call."""
        from jinja2 import TemplateError

        error: Exception | None = None
        for after in (self._after_turn, self._after_calls):
            try:
                if pieces := after(sampled, observation):
                    return pieces
            except (TemplateError, ValueError, TypeError) as raised:
                error = error or raised
        if error:
            raise ConfigError(
                f"the chat template of the model cannot render the environment's messages: {error}"
            ) from error
        raise ConfigError(
            "the chat template of the model drops the model's turn before the environment's messages, or them"
        )

    def _after_turn(self, sampled: Sequence[int], observation: Sequence[Message]) -> list[Piece]:
        """The text after a turn of the model; empty if the template drops the turn or a message."""
        return self._rendered({"role": "assistant", "content": PLACEHOLDER}, observation)

    def _after_calls(self, sampled: Sequence[int], observation: Sequence[Message]) -> list[Piece]:
        """The text after a turn with one call for each message."""
        calls = [_call(message, i == len(observation)) for i, message in enumerate(observation, 1)]
        pieces = self._rendered({"role": "assistant", "content": "", "tool_calls": calls}, observation)
        if not pieces:
            return []
        return [Piece(self._unwritten(sampled, pieces[0].text)), *pieces[1:]]

    def _unwritten(self, sampled: Sequence[int], text: str) -> str:
        """The text after the end of a call, without its beginning that the model has written."""
        written = [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(sampled))]
        if written and written[-1] in self._controls and written[-1] in text:
            return text.partition(written[-1])[2]
        found = self._control.search(text)
        if not found:
            return text
        return text[found.end() :] if found[0] in written else text[found.start() :]

    def _rendered(self, turn: Message, observation: Sequence[Message]) -> list[Piece]:
        """The template's text after `turn`, in pieces; empty if it drops the turn or a message."""
        names = [CONTENT.format(i) for i in range(len(observation))]
        template = self._after(turn, [{**one, "content": name} for one, name in zip(observation, names, strict=True)])
        parts = SPLIT.split(template)
        order = [int(number) for number in parts[1::2]]
        if not template or set(order) != set(range(len(observation))):
            return []
        contents = self._contents(turn, observation, names, template)
        pieces = [Piece(text) for text in parts[::2]]
        for place, number in reversed(list(enumerate(order, 1))):
            pieces.insert(place, Piece(contents[number], is_content=True))
        return pieces

    def _contents(
        self, turn: Message, observation: Sequence[Message], names: Sequence[str], template: str
    ) -> list[str]:
        """The contents as the template writes them: some templates strip or quote a content."""
        found = []
        for message, name in zip(observation, names, strict=True):
            others = [
                {**one, "content": message["content"] if one is message else other}
                for one, other in zip(observation, names, strict=True)
            ]
            before, after = template.split(name)[0], template.split(name)[-1]
            text = self._after(turn, others)
            inside = text.removeprefix(before).removesuffix(after)
            found.append(inside if text == before + inside + after else message["content"])
        return found

    def _after(self, turn: Message, observation: Sequence[Message]) -> str:
        """The rendered text after the model's turn; empty if the template drops the turn."""
        text = self.render([{"role": "user", "content": "."}, turn, *observation], add_generation_prompt=True)
        return text.partition(PLACEHOLDER)[2]  # the first occurrence, since a message may contain it too

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """The tokens of the whole text, unless that makes control tokens of a content."""
        whole = self._encode("".join(piece.text for piece in pieces))
        markers = [self._encode(piece.text) for piece in pieces if not piece.is_content]
        plain = not any(self._control.search(piece.text) for piece in pieces if piece.is_content)
        if plain and self._count(whole) == sum(map(self._count, markers)):
            return whole
        return [
            token
            for piece in pieces
            for token in (self._encode_content(piece.text) if piece.is_content else self._encode(piece.text))
        ]

    def _encode_content(self, text: str) -> list[int]:
        """The tokens of a text that is only data: control tokens in it are encoded as their characters.

        The text is cut behind the first character of each. The tokenizer's option `split_special_tokens` would set a
        state of it that other threads see.
        """
        ends = [found.start() + 1 for found in self._control_begins.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        ids = [token for part in parts if part for token in self._encode(part)]
        controls = set(self._controls.values())
        return [token for token in ids if token not in controls]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False
        ).input_ids
        return ids

    def _count(self, ids: Sequence[int]) -> int:
        controls = set(self._controls.values())
        return sum(token in controls for token in ids)

    @cached_property
    def _controls(self) -> dict[str, int]:
        return control_tokens(self.tokenizer)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return control_pattern(self._controls)

    @cached_property
    def _control_begins(self) -> re.Pattern[str]:
        """Matches before each control token, also before one that begins within another."""
        return re.compile(f"(?={self._control.pattern})")


def _call(message: Message, is_last: bool) -> dict[str, Any]:
    """A call for a tool's message, as templates expect before it; the last one marks the end of the model's turn."""
    arguments = {"text": PLACEHOLDER if is_last else "."}
    function = {"name": message.get("name", "tool"), "arguments": arguments}
    return {"type": "function", "id": message.get("tool_call_id", "000000000"), "function": function}
