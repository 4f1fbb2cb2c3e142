"""Prompts of examples: checked, rendered and tokenised."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import ByColumn, nearest, template_fields
from grpocli.environments.environment import TOOLS_KEY
from grpocli.environments.tools import encodable, name_of, read_arguments
from grpocli.errors import ConfigError
from grpocli.rewards.reward import read_written
from grpocli.text import one_line
from grpocli.types import PREFIX, Message, Prompt, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.environments.tools import Schema
    from grpocli.tasks.task import Example

SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Names of roles in the layout of ShareGPT, whose messages have `from` and `value`."""
ROLES = ("system", "user", "assistant", "tool", "developer")
CHATS = ("messages", "conversations", "conversation", "prompt")
"""Keys of objects that hold a list of messages."""
WRITTEN = re.compile(
    r"""\s*(?:(?:array\()?\[\s*\{|\{(?=.*['"](?:user|human|system)['"]))"""
    r"""(?=.*['"](?:role|from)['"]\s*:)(?=.*['"](?:content|value)['"]\s*:)""",
    re.DOTALL,
)
"""Begins messages, or an object with them, that are written as text."""
TURN = re.compile(
    r"\s*(?:<[^<>\s]+>\s*|\[gMASK\])*?"
    r"(<\|(?:im_start|start_header_id|user|system|start)\|>|<start_of_turn>|<｜User｜>|\[INST\])"
)
"""Begins text that a chat template wrote, maybe after the token that begins every text."""
QUIET: dict[str, Any] = {"return_attention_mask": False, "verbose": False}  # lengths are checked below


def text_of(example: Example, where: str) -> Text:
    """An example's prompt. Raises ConfigError, naming `where`, for an unusable prompt or loss_multiplier."""
    multiplier = example.get("loss_multiplier", 1.0)
    if isinstance(multiplier, str):  # a .csv has no types
        with suppress(ValueError):
            multiplier = float(multiplier)
    if not isinstance(multiplier, int | float) or not 0 <= multiplier < math.inf:
        problem = f"{where} has the loss_multiplier {multiplier!r}"
        raise ConfigError(problem, key="task", hint="it must be a number of 0 or more")
    prompt = in_messages(example["prompt"], where)
    written = json.dumps(prompt, ensure_ascii=False, default=str)
    if encodable(written) != written:
        raise ConfigError(f"{where} has a lone surrogate, half of a character, in its prompt", key="task")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            _check_message(message, where)
        return prompt
    raise ConfigError(f"{where} has the prompt {prompt!r:.200}", key="task", hint="it must be text or messages")


def _check_message(message: Any, where: str) -> None:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role in ROLES and isinstance(content, list) and (other := [one for one in content if not _is_text(one)]):
        problem = f"{where} has {other[0]!r:.200} in a message, and prompts are text alone"
    elif role not in ROLES or not isinstance(content, str):
        problem = f"message {message!r:.200} of {where} needs a `content` and a `role` of {', '.join(ROLES)}"
    elif role == "user" and not content.strip():
        problem = f"{where} has an empty message of the user"
    else:
        return
    raise ConfigError(problem, key="task", hint="mend or remove the row")


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def in_messages(prompt: Any, where: str) -> Any:
    """The prompt; messages, also those written as text or within an object, in the form that chat templates take.

    Raises ConfigError, naming `where`, for messages as text that cannot be read.
    """
    if isinstance(prompt, str) and WRITTEN.match(prompt):
        prompt = read_written(prompt)
        if isinstance(prompt, str):
            hint = "write them as JSON, or keep the data in .jsonl or .parquet"
            raise ConfigError(f"{where} has messages as text that cannot be read", key="task.prompt_column", hint=hint)
    if isinstance(prompt, dict):
        held = (prompt[name] for name in CHATS if isinstance(prompt.get(name), list))
        prompt = [prompt] if {"role", "from"} & prompt.keys() else next(held, prompt)
    if isinstance(prompt, list):
        return [_message(message) if isinstance(message, dict) else message for message in prompt]
    return prompt


def _message(message: Message) -> Message:
    """The message with `role`, and with `content` as text if it is a list of parts that are all text."""
    # a table gives every message the keys of all messages, and chat templates would print a None
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := message.get("tool_calls"), list) and calls:
        message = {"content": "", **message, "tool_calls": list(map(_with_arguments, calls))}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in message and theirs in message:
            message[ours] = message.pop(theirs)
    if isinstance(role := message.get("role"), str):
        message["role"] = SHAREGPT.get(role, role)
    parts = message.get("content")
    if isinstance(parts, list) and all(map(_is_text, parts)):
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _with_arguments(call: Any) -> Any:
    """The call with its arguments as an object, which templates print; servers write them as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        with suppress(ValueError, RecursionError):
            return {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}
    return call


def fill(template: str, values: Mapping[str, Any], where: str, key: str) -> str:
    """The template with values of a row. Raises ConfigError, naming `where`, for a missing or unusable value."""
    known = [name for name, value in values.items() if value is not None]
    for column in template_fields(template, key):
        if column not in known:
            problem = f"{where} has nothing in the column {column!r}; it has {', '.join(known)}"
            raise ConfigError(problem + nearest(column, known), key=key, value=repr(template))
    try:
        return ByColumn().format(template, **values)
    except ValueError as error:
        raise ConfigError(f"cannot be filled with {where}: {error}", key=key, value=repr(template)) from error


def settle_last_turn(messages: list[Message], last_turn: str | None, where: str) -> list[Message]:
    """A conversation that may end with the assistant's turn, as `task.last_turn` wants it: one to continue has PREFIX.

    Raises ConfigError, naming `where`, without a choice.
    """
    if messages[-1].get("role") != "assistant":
        return messages
    if last_turn == "continue":
        return [*messages[:-1], {**messages[-1], PREFIX: True}]
    if last_turn == "drop" and len(messages) > 1:
        return messages[:-1]
    problem = f"{where} ends with the assistant's turn"
    hint = "choose continue, and the model goes on with that turn, or drop, and the turn before it is the last one"
    raise ConfigError(problem, key="task.last_turn", value=last_turn or "null", hint=hint)


def text_hash(text: Text) -> int:
    """A hash of the prompt, equal for equal prompts within a process."""
    return hash(text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str))


def prompt_of(
    example: Example, token_ids: list[int], uid: str, task: str, row: int, target_ids: list[int] | None = None
) -> Prompt:
    """The prompt of a tokenised example. row: its number in the data."""
    columns = dict(example)
    text = columns.pop("prompt")
    if task:
        columns["task_name"] = task
    return Prompt(uid, token_ids, text, columns, row, target_ids)


def tokenize(
    texts: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    where: Callable[[int], str] = "example {}".format,
    tools: Sequence[Schema] = (),
) -> list[list[int]]:
    """Token ids: conversations through the chat template, plain text with the tokenizer's own special tokens.

    where: names a text, by its index, in errors. tools: schemas for the chat template.
    """
    plain = [i for i, text in enumerate(texts) if isinstance(text, str)]
    chats = [i for i, text in enumerate(texts) if not isinstance(text, str)]
    if plain and tools:
        problem = f"{where(plain[0])} is plain text, and tools need a conversation, whose chat template shows them"
        raise ConfigError(problem, key=TOOLS_KEY, value=f"[{','.join(map(name_of, tools))}]")
    found = zip(plain, _plain_ids([str(texts[i]) for i in plain], tokenizer), strict=True) if plain else ()
    ids: dict[int, list[int]] = dict(found)
    if chats:
        ids |= zip(chats, _chat_ids({i: texts[i] for i in chats}, tokenizer, where, tools), strict=True)
    for i in range(len(texts)):
        if not ids[i]:
            raise ConfigError(f"{where(i)} has no tokens", key="task", hint="give it a prompt")
    return [ids[i] for i in range(len(texts))]


def _plain_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows: list[list[int]] = tokenizer(texts, **QUIET).input_ids
    for text, ids in zip(texts, rows, strict=True):
        # if the text itself begins with the token that the tokenizer adds, remove the second
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        # some tokenizers end every text with EOS, but a prompt continues
        ended = ids[-2:] == [eos, eos] or (ids[-1:] == [eos] and not text.endswith(str(tokenizer.eos_token)))
        if eos is not None and len(ids) > 1 and ended:
            del ids[-1]
    return rows


def _chat_ids(
    chats: dict[int, Any], tokenizer: PreTrainedTokenizerBase, where: Callable[[int], str], tools: Sequence[Schema]
) -> list[list[int]]:
    if not tokenizer.chat_template:
        problem = f"its tokenizer has no chat template, but {where(next(iter(chats)))} is a conversation"
        hint = "choose a chat model, give model.chat_template=FILE, or make the prompts plain (task.format=plain)"
        raise ConfigError(problem, key="model", hint=hint)
    texts = [rendered(chat, tokenizer, where(i), tools=tools) for i, chat in chats.items()]
    unseen = [name for name in map(name_of, tools) if name not in texts[0]]
    if unseen:
        problem = f"its chat template does not show the model the tool {unseen[0]}"
        hint = "choose a model trained to call tools, or give model.chat_template=FILE with a template for `tools`"
        raise ConfigError(problem, key="model", hint=hint)
    # the template writes the special tokens itself: adding them again would double the first
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, **QUIET).input_ids
    return ids


def rendered(
    chat: Any, tokenizer: PreTrainedTokenizerBase, where: str, answered: bool = False, tools: Sequence[Schema] = ()
) -> str:
    """The text that the chat template writes for a conversation. answered: it ends with the assistant's turn.

    tools: schemas that it shows. Raises ConfigError, naming `where`, if the template refuses the conversation, or fails
    in another way.
    """
    try:
        shown, goes_on = list(tools) or None, not answered and bool(chat[-1].get(PREFIX))
        begins = not (answered or goes_on)
        return str(
            tokenizer.apply_chat_template(
                chat, tools=shown, tokenize=False, add_generation_prompt=begins, continue_final_message=goes_on
            )
        )
    except Exception as error:  # templates come with models and raise whatever Python does
        problem = f"its chat template refuses {where}: {one_line(str(error)).rstrip('.')}"
        hint = "change the example, or give model.chat_template=FILE"
        raise ConfigError(problem, key="model", hint=hint) from error
