"""Calls of tools in the model's turns, found by transformers' response templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grpocli.environments.tools import UNKNOWN, read_arguments
from grpocli.errors import ConfigError
from grpocli.rollout.turn_encoder import TurnEncoder
from grpocli.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES: dict[str, dict[str, Any]] = {
    "a JSON object between <tool_call> and </tool_call> (Hermes, Qwen 2.5 and 3)": {
        "start_anchor_pattern": r"<\|im_start\|>assistant\n|<assistant>",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*<\|(?:im_end|endoftext|eot_id)\|>|<end>"},
        },
    },
    "<function=NAME><parameter=KEY> between <tool_call> and </tool_call> (Qwen 3 Coder and 3.5)": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"\s*<\|(?:im_end|endoftext)\|>"},
        },
    },
    'a turn that is {"name": ..., "parameters": ...} (Llama 3)': {
        "start_anchor_pattern": r"<\|start_header_id\|>assistant<\|end_header_id\|>\s*",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{)",
                "close_pattern": r"\s*<\|(?:eot_id|eom_id)\|>",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
            "content": {"close_pattern": r"\s*<\|(?:eot_id|eom_id)\|>"},
        },
    },
    "<|tool_call>call:NAME{...}<tool_call|> (Gemma 4)": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>\s*call:(?P<name>[\w.-]+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    "<start_function_call>call:NAME{...}<end_function_call> (FunctionGemma)": {
        "start_anchor": "<start_of_turn>model\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<start_function_call>\s*call:(?P<name>[\w.-]+)",
                "close": "<end_function_call>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": ["<end_of_turn>", "<start_function_response>", "<eos>"]},
        },
    },
    "[TOOL_CALLS] and a JSON list (Mistral)": {
        "start_anchor": "[/INST]",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)",
                "close": "</s>",
                "content": "json",
                "transform": {
                    "type": "function",
                    "id": "{id}",
                    "function": {"name": "{name}", "arguments": "{arguments}"},
                },
                "transform_each": True,
            },
            "content": {"close": "</s>"},
        },
    },
}
"""Response templates in transformers' format. A model's is the first that reads the calls its chat template writes."""
PROBE = {"name": "probe", "arguments": {"text": "a b"}}
LONGEST_REASON = 200
"""Most characters of the reason why a call cannot be read."""
CALL_ID = re.compile(r"[\w-]{1,64}")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of a call that cannot be read."""


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
        reason = ""
        try:
            parsed = self._parse(text, self.template)
            calls = _calls(parsed.get("tool_calls") or [])
        except UNREADABLE as error:
            reason = _reason(error)
            parsed, calls = self._read_each(text)
        malformed = {"malformed": reason} if reason else {}
        if all("malformed" in call for call in calls):
            return message | malformed
        thinking = {name: parsed[name] for name in ("thinking",) if isinstance(parsed.get(name), str)}
        content = parsed.get("content")
        shown = content if isinstance(content, str) else ""
        return message | {"content": shown, **thinking, "tool_calls": calls} | malformed

    def _parse(self, text: str, template: Any) -> dict[str, Any]:
        tools = list(self.encoder.tools)
        found: dict[str, Any] = self.tokenizer.parse_response(text, template, prefix=self._opening, tools=tools)
        return found

    def _read_each(self, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A turn with a call that cannot be read: the parsed turn, and its calls, each read alone."""
        calls = self.template.fields["tool_calls"]
        if not calls.repeats:
            return {}, []
        raw = {"content": "text", "content_args": {"strip": False}, "transform": None, "transform_each": False}
        fields = {**self.template.fields, "tool_calls": replace(calls, **raw)}
        try:
            parsed = self._parse(text, replace(self.template, fields=fields))
        except UNREADABLE:
            return {}, []
        return parsed, [self._read(part) for part in _parts(text, parsed.get("tool_calls") or [], calls)]

    def _read(self, part: str) -> dict[str, Any]:
        """The only call in a part of a turn."""
        try:
            (call,) = _calls(self._parse(part, self.template).get("tool_calls") or [])
        except UNREADABLE as error:
            return {"type": "function", "function": {"name": UNKNOWN, "arguments": {}}, "malformed": _reason(error)}
        return call

    @cached_property
    def template(self) -> Any:
        """The response template. Raises ConfigError if none is known, or the tokenizer's is broken."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        own = getattr(self.tokenizer, "response_template", None)
        written = self._written_call()
        try:
            known = [load_response_template(template) for template in ([own] if own else []) + [*TEMPLATES.values()]]
        except (ValueError, TypeError, AttributeError) as error:
            problem = f"the response template of its tokenizer cannot be used: {error}"
            raise ConfigError(problem, key="model", hint="give model.response_template=FILE") from error
        reads = [template for template in known if written and _reads_probe(template, written)]
        if reads or own:  # a chat template that refuses the probe says nothing about the tokenizer's own
            return (reads or known)[0]
        problem = f"its chat template writes calls of tools in none of these formats: {'; '.join(TEMPLATES)}"
        hint = "give model.response_template=FILE, a response template of transformers, or another model.chat_template"
        raise ConfigError(problem, key="model", hint=hint)

    def _written_call(self) -> str:
        """The text of a turn with a call, as the chat template writes it; empty if it writes none."""
        from jinja2 import TemplateError

        user: Message = {"role": "user", "content": "."}
        call = {"type": "function", "id": "000000000", "function": PROBE}
        try:
            before = self.encoder.render([user])
            return self.encoder.render([user, {"role": "assistant", "content": "", "tool_calls": [call]}]).removeprefix(
                before
            )
        except (TemplateError, ValueError, TypeError):
            return ""

    @cached_property
    def _opening(self) -> str:
        """The beginning of a turn, for templates that write a part of it; never text of a conversation."""
        opening = self.encoder.generation_prompt
        return opening if self.template.start_anchor_re.search(opening) else ""


def _parts(text: str, bodies: Sequence[str], field: Any) -> Iterator[str]:
    """The parts of a turn that are its calls, with their markers. bodies: the texts between the markers, in order."""
    place = 0
    for body in bodies:
        for opened in field.open_re.finditer(text, place):
            if text.startswith(body, opened.end()):
                end = opened.end() + len(body)
                closed = field.close_re.match(text, end) if field.close_re else None
                place = closed.end() if closed else end
                yield text[opened.start() : place]
                break


def _reads_probe(template: Any, written: str) -> bool:
    from transformers.utils.chat_parsing import parse_response

    try:
        found = parse_response("", template, prefix=written).get("tool_calls")
        return [call["function"] for call in _calls(found or [])] == [PROBE]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _calls(found: Any) -> list[dict[str, Any]]:
    """Calls in the form of chat templates. Raises ValueError for anything else."""
    calls = [_checked(call) for call in (found if isinstance(found, list) else [found])]
    try:
        json.dumps(calls, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text is not valid Unicode") from error
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
    return " ".join(str(cause).split())[:LONGEST_REASON]
