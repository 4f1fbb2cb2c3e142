"""Prompts of a split: checked, tokenised once at the start, and none longer than the limit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.processes.deadline import within
from grpocli.tasks.json_rows import encodable, short
from grpocli.types import Prompt, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.tasks.task import Example

ROLES = ("system", "user", "assistant", "tool", "developer")
TEMPLATE_SECONDS = 30.0
"""Time limit of a chat template, plus 0.01 s per conversation: templates come with models and may loop forever."""
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
    prompt = example["prompt"]
    if not all(encodable(text) for text in _texts(prompt)):
        raise ConfigError(f"{where} has a lone surrogate, half of a character, in its prompt", key="task")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            if not _is_message(message):
                raise ConfigError(
                    f"message {short(message)} of {where} needs a `content` and a `role` of {', '.join(ROLES)}",
                    key="task",
                )
        return prompt
    raise ConfigError(f"{where} has the prompt {short(prompt)}", key="task", hint="it must be text or messages")


def _texts(prompt: object) -> list[str]:
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return [content for content in contents if isinstance(content, str)]


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return message.get("role") in ROLES and isinstance(message.get("content"), str)


def text_hash(text: Text) -> int:
    """A hash of the prompt, equal for equal prompts within a process."""
    return hash(text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str))


class PromptSet:
    """The examples of one split as token ids.

    task: name of the task, which every prompt has as the column `task_name`. limit: limit of examples, from the first.
    Prompts over `max_tokens` are dropped (`long_prompts="drop"`) or lose their beginning (`"truncate"`). n_dropped,
    n_truncated: their numbers; report: a sentence about them, empty if there are none.
    Raises ConfigError if an example has no usable prompt, the tokenizer has no chat template for a conversation, or
    all prompts are too long.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        long_prompts: str,
        name: str,
        task: str = "",
        limit: int | None = None,
    ) -> None:
        self.name, self.max_tokens, self.task = name, max_tokens, task
        self._examples = examples
        texts = [text_of(example, self._where(i)) for i, example in enumerate(islice(examples, limit))]
        token_ids = tokenize(texts, tokenizer, self._where)
        lengths = [len(ids) for ids in token_ids]
        long = {i for i, n in enumerate(lengths) if n > max_tokens}
        drop = long_prompts == "drop"
        self._kept = [i for i in range(len(token_ids)) if not (drop and i in long)]
        self._token_ids = {i: token_ids[i][-max_tokens:] for i in self._kept}
        self.hashes = [text_hash(texts[i]) for i in self._kept]
        self.n_dropped, self.n_truncated = (len(long), 0) if drop else (0, len(long))
        if not self._kept:
            raise ConfigError(
                f"all {len(lengths)} {name} prompts are longer, the shortest has {min(lengths)} tokens",
                key="rollout.max_prompt_tokens",
                value=max_tokens,
                hint="raise it",
            )

    @property
    def report(self) -> str:
        if not self.n_dropped + self.n_truncated:
            return ""
        what = "dropped" if self.n_dropped else "cut on the left"
        total = len(self._kept) + self.n_dropped
        return (
            f"{self.n_dropped + self.n_truncated} of {total} {self.name} prompts are longer than "
            f"rollout.max_prompt_tokens={self.max_tokens} and were {what}"
        )

    def __len__(self) -> int:
        return len(self._kept)

    def shared_with(self, others: PromptSet) -> list[int]:
        """Indices of the prompts that are also among `others`, by a hash of their text."""
        theirs = set(others.hashes)
        return [index for index, one in enumerate(self.hashes) if one in theirs]

    def prompt(self, index: int, uid: str) -> Prompt:
        """The index-th kept prompt."""
        place = self._kept[index]
        return prompt_of(self._examples[place], self._token_ids[place], uid, self.task, self._numbers[place])

    @property
    def rows(self) -> list[int]:
        """The number in the data of each kept prompt, ascending."""
        return [self._numbers[place] for place in self._kept]

    def values(self, column: str) -> dict[int, tuple[Any, str]]:
        """{row: (its value in a column, the name of the example in errors)}, None without the column."""
        kept, numbers = set(self._kept), self._numbers
        examples = ((i, one) for i, one in enumerate(self._examples) if i in kept)
        return {numbers[i]: (one.get(column), self._where(i)) for i, one in examples}

    @property
    def _numbers(self) -> Sequence[int]:
        """The number in its data of each example."""
        numbers: Sequence[int] = getattr(self._examples, "numbers", range(len(self._examples)))
        return numbers

    def _where(self, index: int) -> str:
        """The name of an example in errors, with its row if it comes from a table."""
        row = getattr(self._examples, "where", None)
        return f"{self.name} example {index}" + (f" ({row(index)})" if row else "")


def prompt_of(example: Example, token_ids: list[int], uid: str, task: str, row: int) -> Prompt:
    """The prompt of a tokenised example. row: its number in the data."""
    columns = dict(example)
    text = columns.pop("prompt")
    if task:
        columns["task_name"] = task
    return Prompt(uid, token_ids, text, columns, row)


def tokenize(
    texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase, where: Callable[[int], str] = "example {}".format
) -> list[list[int]]:
    """Token ids: conversations through the chat template, plain text with the tokenizer's own special tokens.

    where: names a text, by its index, in errors.
    """
    ids: list[list[int]] = [[] for _ in texts]
    plain = [i for i, text in enumerate(texts) if isinstance(text, str)]
    chats = [i for i, text in enumerate(texts) if not isinstance(text, str)]
    if plain:
        for i, one in zip(plain, _plain_ids([str(texts[i]) for i in plain], tokenizer), strict=True):
            ids[i] = one
    if chats:
        for i, one in zip(chats, _chat_ids({i: texts[i] for i in chats}, tokenizer, where), strict=True):
            ids[i] = one
    for i, one in enumerate(ids):
        if not one:
            raise ConfigError(f"{where(i)} has no tokens", key="task", hint="give it a prompt")
    return ids


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
    chats: dict[int, Any], tokenizer: PreTrainedTokenizerBase, where: Callable[[int], str]
) -> list[list[int]]:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"its tokenizer has no chat template, but {where(next(iter(chats)))} is a conversation",
            key="model",
            hint="choose a chat model, give model.chat_template=FILE, or make the prompts plain "
            "(format=plain of task=jsonl)",
        )
    seconds = TEMPLATE_SECONDS + len(chats) / 100
    try:
        texts = within(
            seconds, "", lambda: [_written(chat, tokenizer, where(i)) for i, chat in chats.items()]
        )  # one deadline for all, since starting one per text takes longer than most templates
    except TimeoutError as error:
        problem = f"its chat template does not write {len(chats):,} conversations within {seconds:.0f} s"
        raise ConfigError(problem, key="model", hint="give model.chat_template=FILE") from error
    # the template writes the special tokens itself: adding them again would double the first
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, **QUIET).input_ids
    return ids


def _written(chat: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"its chat template refuses {where}: {reason}",
            key="model",
            hint="change the example, or give model.chat_template=FILE",
        ) from error
