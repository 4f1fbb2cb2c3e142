"""Turns of a conversation as tokens: messages between the model's turns, and the calls of tools within them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpocli.environments.tools import UNKNOWN, read_arguments
from grpocli.errors import ConfigError
from grpocli.models.chat_template import control_pattern, control_tokens
from grpocli.text import one_line, shorten
from grpocli.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "grpocli-turn"
"""Stands in for the model's turn when the chat template is rendered, because sampled tokens are never encoded again."""
CONTENT = "grpocli-content-{}-"
"""Stands in for the content of a message."""
SPLIT = re.compile(r"grpocli-content-(\d+)-")
TEMPLATES = Path(__file__).with_name("response_templates.json")
"""Response templates in transformers' format, by what they read, as a tokenizer has its own in `response_template`.
A model's is the first that reads the calls its chat template writes."""
PROBE = {"name": "probe", "arguments": {"text": "a b"}}
LONGEST_REASON = 200
"""Most characters of the reason why a call cannot be read."""
CALL_ID = re.compile(r"[\w-]{1,64}")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of a call that cannot be read."""


class Piece(NamedTuple):
    """A part of a rendered text: markers of the template, or the content of a message, which is only data."""

    text: str
    is_content: bool = False


@dataclass(frozen=True, eq=False)
class TurnEncoder:
    """Encodes an environment's messages with the chat template of `tokenizer`, or as plain text after plain prompts.

    tools: schemas for the chat template. In a conversation, text in a message never becomes a control token.
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
        given = {"tools": list(self.tools) or None, "add_generation_prompt": add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **given))

    def cut(self, text: str, tokens: int) -> str:
        """The text, without what follows its first `tokens` tokens."""
        ids = self._encode_content(text)
        if len(ids) <= tokens:
            return text
        return f"{self.tokenizer.decode(ids[:tokens])}\n[cut after {tokens} tokens]"

    def _pieces(self, sampled: Sequence[int], observation: Sequence[Message]) -> list[Piece]:
        """The rendered messages. Many templates write a tool's message by itself, some only after its call."""
        from jinja2 import TemplateError

        calls = [_call(message, i == len(observation)) for i, message in enumerate(observation, 1)]
        error: Exception | None = None
        for turn in ({"content": PLACEHOLDER}, {"content": "", "tool_calls": calls}):
            try:
                pieces = self._rendered({"role": "assistant", **turn}, observation)
            except (TemplateError, ValueError, TypeError) as raised:
                error = error or raised
                continue
            if pieces and "tool_calls" in turn:
                return [Piece(self._unwritten(sampled, pieces[0].text)), *pieces[1:]]
            if pieces:
                return pieces
        problem = f"cannot render them: {error}" if error else "drops them, or the model's turn before them"
        raise ConfigError(f"the environment's messages: the chat template of the model {problem}") from error

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
        separate = (self._encode_content(text) if is_content else self._encode(text) for text, is_content in pieces)
        return [*chain.from_iterable(separate)]

    def _encode_content(self, text: str) -> list[int]:
        """The tokens of a text that is only data: control tokens in it are encoded as their characters.

        The text is cut behind the first character of each. The tokenizer's option `split_special_tokens` would set a
        state of it that other threads see.
        """
        ends = [found.start() + 1 for found in self._control_begins.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        ids = [token for part in parts if part for token in self._encode(part)]
        return [token for token in ids if token not in self._control_ids]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _count(self, ids: Sequence[int]) -> int:
        return sum(token in self._control_ids for token in ids)

    @cached_property
    def _control_ids(self) -> set[int]:
        return set(self._controls.values())

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


@dataclass(frozen=True, eq=False)
class CallParser:
    """Finds the calls of tools in a turn of the model.

    It uses the first response template that reads the calls its chat template writes: the tokenizer's, or one of
    TEMPLATES.
    """

    encoder: TurnEncoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    def message(self, token_ids: Sequence[int]) -> Message:
        """A turn as a message: `tool_calls` if it calls tools, `malformed` with the reason if one cannot be read.

        A turn without a call that can be read has its whole text as `content`; in others a call that cannot be read is
        one of `tool_calls`, with `malformed`.
        """
        message = {"role": "assistant", "content": str(self.tokenizer.decode(token_ids, skip_special_tokens=True))}
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        parsed, calls, reason = self._read(text)
        malformed = {"malformed": reason} if reason else {}
        if reason:
            parsed, calls = self._read_each(text)
        if all("malformed" in call for call in calls):
            return message | malformed
        texts = {name: parsed[name] for name in ("content", "thinking") if isinstance(parsed.get(name), str)}
        return message | {"content": "", **texts, "tool_calls": calls} | malformed

    def _read(self, text: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
        """The parsed turn and its calls, and the reason why they cannot be read; empty if they can."""
        tools = list(self.encoder.tools)
        try:
            parsed = self.tokenizer.parse_response(text, self.template, prefix=self._opening, tools=tools)
            return parsed, _calls(parsed.get("tool_calls") or []), ""
        except UNREADABLE as error:
            return {}, [], _reason(error)

    def _read_each(self, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The parsed turn and its calls, each read alone, in formats with markers around each one."""
        field = self.template.fields["tool_calls"]
        calls: list[dict[str, Any]] = []
        for part in list(_parts(text, field)) if field.repeats else []:
            text = text.replace(part, "", 1)
            _, found, reason = self._read(part)
            unknown = {"type": "function", "function": {"name": UNKNOWN, "arguments": {}}, "malformed": reason}
            calls += [unknown] if reason else found
        return self._read(text)[0] if calls else {}, calls

    @cached_property
    def template(self) -> Any:
        """The response template. Raises ConfigError if none is known, or the tokenizer's is broken."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        own = getattr(self.tokenizer, "response_template", None)
        ready, written = json.loads(TEMPLATES.read_text()), self._written_call()
        try:
            known = [load_response_template(template) for template in ([own] if own else []) + [*ready.values()]]
        except (ValueError, TypeError, AttributeError) as error:
            problem = f"the response template of its tokenizer cannot be used: {error}"
            raise ConfigError(problem, key="model", hint="mend the tokenizer's response_template") from error
        reads = [template for template in known if written and _reads_probe(template, written)]
        if reads or own:  # a chat template that refuses the probe says nothing about the tokenizer's own
            return (reads or known)[0]
        problem = f"its chat template writes calls of tools in none of these formats: {'; '.join(ready)}"
        hint = "give the tokenizer a response_template of transformers, or another model.chat_template"
        raise ConfigError(problem, key="model", hint=hint)

    def _written_call(self) -> str:
        """The text of a turn with a call, as the chat template writes it; empty if it writes none."""
        from jinja2 import TemplateError

        user: Message = {"role": "user", "content": "."}
        call = {"type": "function", "id": "000000000", "function": PROBE}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self.encoder.render([user, turn]).removeprefix(self.encoder.render([user]))
        except (TemplateError, ValueError, TypeError):
            return ""

    @cached_property
    def _opening(self) -> str:
        """The beginning of a turn, for templates that write a part of it; never text of a conversation."""
        opening = self.encoder.generation_prompt
        return opening if self.template.start_anchor_re.search(opening) else ""


def _parts(text: str, field: Any) -> Iterator[str]:
    """The parts of a turn that are its calls, with their markers."""
    place = 0
    while opened := field.open_re.search(text, place):
        closed = field.close_re.search(text, opened.end()) if field.close_re else None
        place = closed.end() if closed else len(text)
        yield text[opened.start() : place]


def _reads_probe(template: Any, written: str) -> bool:
    from transformers.utils.chat_parsing import parse_response

    try:
        found = parse_response("", template, prefix=written).get("tool_calls")
        return [call["function"] for call in _calls(found or [])] == [PROBE]
    except UNREADABLE:
        return False


def _calls(found: Any) -> list[dict[str, Any]]:
    """Calls in the form of chat templates. Raises ValueError for anything else."""
    calls = [_checked(call) for call in (found if isinstance(found, list) else [found])]
    json.dumps(calls, allow_nan=False, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return calls


def _checked(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call is an object with the name of a function and its arguments")
    arguments = read_arguments(function.get("arguments"))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object with their names")
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    identity = call.get("id")
    return found | ({"id": identity} if isinstance(identity, str) and CALL_ID.fullmatch(identity) else {})


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    cause = error.__cause__ if isinstance(error.__cause__, json.JSONDecodeError) else error
    return shorten(one_line(str(cause)), LONGEST_REASON)


def _call(message: Message, is_last: bool) -> dict[str, Any]:
    """A call for a tool's message, as templates expect before it; the last one marks the end of the model's turn."""
    arguments = {"text": PLACEHOLDER if is_last else "."}
    function = {"name": message.get("name", "tool"), "arguments": arguments}
    return {"type": "function", "id": message.get("tool_call_id", "000000000"), "function": function}
