"""Prompts of examples: checked, rendered, tokenised once at the start, none longer than the limit.

In supervised training with their targets: the answer of the data, as the tokens that the model would write.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from grpocli.config.parts import ByColumn, nearest, template_fields
from grpocli.environments.environment import TOOLS_KEY, loaded_environment_of
from grpocli.environments.tools import encodable, name_of, read_arguments, tools_of
from grpocli.errors import ConfigError, config_errors
from grpocli.rewards.reward import read_written, with_one_answer
from grpocli.text import one_line
from grpocli.types import Message, Prompt, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
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
QUIET: dict[str, Any] = {"return_attention_mask": False, "verbose": False}  # lengths are checked below
TARGET_KEY = "task.target_template"
PARTS = ("content", "reasoning_content", "thinking", "tool_calls")
"""Parts of an answer, which the chat template must write if a message has them."""
Target: TypeAlias = str | Message
"""The text of an answer, or the model's turn with its calls and thoughts."""


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
    with config_errors(ValueError, says=f"cannot be filled with {where}: {{}}", key=key, value=repr(template)):
        return ByColumn().format(template, **values)


def check_last_turn(messages: Sequence[Message], where: str) -> None:
    """Raise ConfigError, naming `where`, for a conversation that ends with the assistant's turn."""
    if messages[-1].get("role") == "assistant":
        hint = "leave that turn out by task.processor, or teach it with `grpocli sft`"
        raise ConfigError(f"{where} ends with the assistant's turn", key="task", hint=hint)


def text_hash(text: Text) -> int:
    """A hash of the prompt, equal for equal prompts within a process."""
    return hash(text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str))


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
    says, hint = f"its chat template refuses {where}: {{}}", "change the example, or give model.chat_template=FILE"
    # templates come with models and raise whatever Python does
    with config_errors(Exception, says=says, why=lambda e: one_line(str(e)).rstrip("."), key="model", hint=hint):
        shown = {"tools": list(tools) or None, "add_generation_prompt": not answered}
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **shown))


@dataclass(frozen=True, slots=True)
class Targets:
    """Makes the targets of a task's examples."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    end_ids: frozenset[int]
    """Tokens that end a completion."""
    template: str | None = None
    """Text with {column} fields; None: the last turn of a conversation that ends with the assistant's, otherwise
    `otherwise`."""
    otherwise: str = "{answer}"
    tools: Sequence[Schema] = ()
    """Schemas that the chat template shows."""

    def split(self, example: Example, where: str) -> tuple[Example, Target]:
        """The example without the assistant's last turn, and its target: that turn, or the template's text.

        Raises ConfigError, naming `where`, for a missing column, an empty target and a call that is none.
        """
        prompt = example["prompt"]
        last = prompt[-1] if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) else {}
        if last.get("role") != "assistant":
            return example, self._filled(example, self.template or self.otherwise, where)
        if len(prompt) == 1:
            raise ConfigError(f"{where} has only an answer", key="task", hint="give it a prompt before the answer")
        bare = {**example, "prompt": prompt[:-1]}
        if self.template is not None:
            return bare, self._filled(example, self.template, where)
        full = {name: value for name, value in last.items() if value != []}  # some templates print an empty part
        turn: Any = text_of({**example, "prompt": [full]}, where)[0]
        for call in turn.get("tool_calls", ()):
            _check_call(call, where)
        parts = [turn[part] for part in PARTS if turn.get(part)]
        self._checked("".join(one if isinstance(one, str) else json.dumps(one) for one in parts), where)
        return bare, turn

    def _filled(self, example: Example, template: str, where: str) -> str:
        return self._checked(fill(template, with_one_answer(example), where, TARGET_KEY), where)

    def _checked(self, target: str, where: str) -> str:
        if not target.strip() or encodable(target) != target:
            problem = f"the target of {where} is empty, or has a lone surrogate, half of a character"
            raise ConfigError(problem, key=TARGET_KEY, hint="repair or remove the row")
        return target

    def token_ids(
        self, prompts: Sequence[Text], targets: Sequence[Target], where: Callable[[int], str] = "example {}".format
    ) -> list[list[int]]:
        """The tokens that follow each tokenised prompt: the target and the token that ends it.

        In a conversation they are what the chat template writes after the generation prompt. Raises ConfigError if the
        template writes something else before it.
        """
        prompt_ids = tokenize(prompts, self.tokenizer, where, self.tools)
        pairs = enumerate(zip(prompts, targets, strict=True))
        texts = [self._texts(prompt, one, where(i)) for i, (prompt, one) in pairs]
        whole_ids = self._whole(prompts, [whole for whole, _ in texts])
        after_ids = self.tokenizer([after for _, after in texts], add_special_tokens=False, **QUIET).input_ids
        found = zip(prompt_ids, whole_ids, after_ids, strict=True)
        return [self._ended(_after(before, whole, after)) for before, whole, after in found]

    def _texts(self, prompt: Text, target: Target, where: str) -> tuple[str, str]:
        """The text of prompt and target together, and the part of it after the prompt."""
        if isinstance(prompt, str):
            return f"{prompt}{target}", str(target)
        turn = target if isinstance(target, dict) else {"role": "assistant", "content": target}
        before = rendered(prompt, self.tokenizer, where, tools=self.tools)
        whole = self._answered(prompt, turn, where)
        self._check_written(prompt, turn, whole, where)
        if not whole.startswith(before):
            problem = f"its chat template writes the prompt of {where} in another way when an answer follows"
            hint = "give model.chat_template=FILE whose generation prompt is the beginning of an answer"
            raise ConfigError(problem, key="model", hint=hint)
        return whole, whole.removeprefix(before)

    def _answered(self, prompt: Sequence[Message], turn: Message, where: str) -> str:
        return rendered([*prompt, turn], self.tokenizer, where, answered=True, tools=self.tools)

    def _check_written(self, prompt: Sequence[Message], turn: Message, whole: str, where: str) -> None:
        """Raise ConfigError if the template leaves out a part of the answer. Every template writes a content alone."""
        parts = [part for part in PARTS if turn.get(part)]
        for part in parts if parts != ["content"] else []:
            without = {name: value for name, value in turn.items() if name != part}
            written = ""
            with suppress(ConfigError):  # the template needs the part
                written = self._answered(prompt, {"content": "", **without}, where)
            if written == whole:
                problem = f"its chat template does not write the {part} of the answer of {where}"
                hint = "remove it from the data, or give model.chat_template=FILE"
                raise ConfigError(problem, key="model", hint=hint)

    def _whole(self, prompts: Sequence[Text], texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts, with the special tokens that `tokenize` gives their prompts."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, **QUIET).input_ids
        plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        for i, one in zip(plain, tokenize([texts[i] for i in plain], self.tokenizer), strict=True):
            ids[i] = one
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        """The tokens up to the last one that ends a completion; with one, if there is none."""
        ends = self.end_ids | {int(self.tokenizer.eos_token_id)}
        last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in ends), None)
        return [*ids, int(self.tokenizer.eos_token_id)] if last is None else ids[: last + 1]


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    parts = [function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
    if list(map(type, parts)) != [str, dict]:
        hint = 'it must be {"type": "function", "function": {"name": NAME, "arguments": OBJECT}}'
        raise ConfigError(f"{where} has the call {call!r:.200}", key="task", hint=hint)


def _after(prompt_ids: list[int], whole_ids: list[int], after_ids: list[int]) -> list[int]:
    """The tokens of the whole after the prompt; those of the text alone, if a token spans the border."""
    n = len(prompt_ids)
    return list(whole_ids[n:]) if whole_ids[:n] == prompt_ids and len(whole_ids) > n else list(after_ids)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of a task's examples, and in supervised training their targets."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """`rollout.max_prompt_tokens`."""
    long_prompts: str = "drop"
    """`rollout.long_prompts`: prompts over `max_tokens` are left out (`drop`) or lose their beginning (`truncate`);
    targets over their own limit are left out or lose their end."""
    task: str = ""
    """Name of the task, which every prompt has as the column `task_name`."""
    targets: Targets | None = None
    """None: no supervised training."""
    tools: Sequence[Schema] = ()
    """Schemas that the chat template shows to the model."""

    @classmethod
    def of(
        cls,
        name: str,
        task: object,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int] | None = None,
    ) -> PromptMaker:
        """The prompts of a task of a run.

        end_ids: tokens that end a completion, beside the tokenizer's; None: without targets of supervised training.
        """
        tools = tools_of(loaded_environment_of(task))
        targets = None
        if run.algorithm.supervised and end_ids is not None:
            template, otherwise = getattr(task, "target_template", None), getattr(task, "shot_template", None)
            limit = run.rollout.max_completion_tokens
            targets = Targets(tokenizer, limit, end_ids, template, otherwise or "{answer}", tools)
        limits = run.rollout.max_prompt_tokens, run.rollout.long_prompts
        return cls(tokenizer, *limits, name, targets, tools)

    @property
    def drops(self) -> bool:
        """Whether long prompts are left out."""
        return self.long_prompts == "drop"

    def settled(self, example: Example, where: str) -> tuple[Example, Target]:
        """The example with the prompt that the model gets, and its target; empty without supervised training.

        Raises ConfigError, naming `where`, for an unusable prompt or target.
        """
        target: Target = ""
        if self.targets:
            example, target = self.targets.split(example, where)
        text = text_of(example, where)
        if not isinstance(text, str) and not self.targets:
            check_last_turn(text, where)
        return {**example, "prompt": text}, target

    def token_ids(
        self, settled: Sequence[tuple[Example, Target]], where: Callable[[int], str]
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """The tokens of prompts and of their targets, of whatever length. where: names an example in errors."""
        texts = [example["prompt"] for example, _ in settled]
        ids = tokenize(texts, self.tokenizer, where, self.tools)
        targets = self.targets
        return ids, targets.token_ids(texts, [target for _, target in settled], where) if targets else None

    def prompt(self, example: Example, ids: list[int], target_ids: list[int] | None, uid: str, row: int) -> Prompt:
        """The prompt of a settled example. row: its number in the data."""
        columns = dict(example)
        text = columns.pop("prompt")
        if self.task:
            columns["task_name"] = self.task
        return Prompt(uid, ids, text, columns, row, target_ids)


class PromptSet:
    """The examples of one split as token ids.

    name: of the split in messages. limit: of examples, from the first. needs_targets: whether an example whose target
    is too long is left out, as one with a long prompt is.
    Raises ConfigError if an example has no usable prompt, the tokenizer has no chat template for a conversation, or
    all prompts or targets are too long.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        maker: PromptMaker,
        name: str,
        limit: int | None = None,
        needs_targets: bool = True,
    ) -> None:
        self.name, self.maker = name, maker
        self._examples, self._reports = examples, list[str]()
        settled = [maker.settled(example, self._where(i)) for i, example in enumerate(islice(examples, limit))]
        every, every_target = maker.token_ids(settled, self._where)
        self._total = len(every)
        what = "dropped" if maker.drops else "cut on the left"
        long = self._long(dict(enumerate(every)), "prompts", "rollout.max_prompt_tokens", maker.max_tokens, what)
        kept = {i: ids[-maker.max_tokens :] for i, ids in enumerate(every) if not (maker.drops and i in long)}
        targets: dict[int, list[int]] = {}
        if every_target and maker.targets:
            targets, most = {i: every_target[i] for i in kept}, maker.targets.max_tokens
            dropped = "dropped" if needs_targets else "left out of eval/loss"
            what = dropped if maker.drops else "cut at the end"
            long = self._long(targets, "targets", "rollout.max_completion_tokens", most, what)
            targets = {i: ids[:most] for i, ids in targets.items() if not (maker.drops and i in long)}
            kept = {i: ids for i, ids in kept.items() if i in targets or not needs_targets}
        self._token_ids, self._target_ids, self._kept = kept, targets, list(kept)
        self.hashes = [text_hash(settled[i][0]["prompt"]) for i in self._kept]

    def _long(self, ids: Mapping[int, list[int]], what: str, key: str, most: int, becomes: str) -> set[int]:
        """Those with more than `most` tokens, for the report. Raises ConfigError if all would be dropped."""
        long = {i for i, one in ids.items() if len(one) > most}
        if becomes == "dropped" and len(long) == len(ids):
            shortest = min(map(len, ids.values()))
            problem = f"all {len(long)} {self.name} {what} are longer, the shortest has {shortest} tokens"
            raise ConfigError(problem, key=key, value=most, hint="raise it")
        if long:
            sentence = (
                f"{len(long)} of {self._total} {self.name} {what} are longer than {key}={most} and were {becomes}"
            )
            self._reports.append(sentence)
        return long

    @property
    def report(self) -> str:
        """A sentence about long prompts and targets; empty if there are none."""
        return "; ".join(self._reports)

    def __len__(self) -> int:
        return len(self._kept)

    def shared_with(self, others: PromptSet) -> list[int]:
        """Indices of the prompts that are also among `others`, by a hash of their text."""
        theirs = set(others.hashes)
        return [index for index, one in enumerate(self.hashes) if one in theirs]

    def prompt(self, index: int, uid: str) -> Prompt:
        """The index-th kept prompt."""
        place = self._kept[index]
        example, _ = self.maker.settled(self._examples[place], self._where(place))
        row = self._numbers[place]
        return self.maker.prompt(example, self._token_ids[place], self._target_ids.get(place), uid, row)

    def values(self, column: str) -> list[Any]:
        """The value of each kept prompt in a column; None without the column."""
        return [self._examples[place].get(column) for place in self._kept]

    def where(self, index: int) -> str:
        """The name of the index-th kept prompt in errors."""
        return self._where(self._kept[index])

    @property
    def _numbers(self) -> Sequence[int]:
        """The number in its data of each example."""
        numbers: Sequence[int] = getattr(self._examples, "numbers", range(len(self._examples)))
        return numbers

    def _where(self, index: int) -> str:
        """The name of an example in errors, with its row if it comes from a table."""
        row = getattr(self._examples, "where", None)
        return f"{self.name} example {index}" + (f" ({row(index)})" if row else "")
