"""From examples to prompts: tokenised once, at the start, and none too long for the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpocli.data import Prompt, Text
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.tasks.task import Example

QUIET: dict[str, Any] = {"return_attention_mask": False, "verbose": False}  # lengths are checked here
ROLES = ("system", "user", "assistant", "tool", "developer")


class PromptSet:
    """The examples of one split as token ids.

    task: its name, which every prompt has as the column `task_name`.
    Prompts over `max_tokens` are dropped (`long_prompts="drop"`) or lose their beginning (`"truncate"`).
    n_dropped, n_truncated: how many; report: a sentence about it, empty where there is nothing to say.
    Raises ConfigError where an example is no prompt, the tokenizer has no chat template for a conversation, or
    no prompt is short enough.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        long_prompts: str,
        name: str,
        task: str = "",
    ) -> None:
        self.name, self.max_tokens, self.task = name, max_tokens, task
        self._examples = examples
        texts = [_text(example, i, name) for i, example in enumerate(examples)]
        token_ids = tokenize(texts, tokenizer)
        lengths = [len(ids) for ids in token_ids]
        long = {i for i, n in enumerate(lengths) if n > max_tokens}
        drop = long_prompts == "drop"
        self._kept = [i for i in range(len(token_ids)) if not (drop and i in long)]
        self._token_ids = {i: token_ids[i][-max_tokens:] for i in self._kept}
        self._hashes = [_hash(texts[i]) for i in self._kept]
        self.n_dropped, self.n_truncated = (len(long), 0) if drop else (0, len(long))
        if not self._kept:
            raise ConfigError.of(
                "rollout.max_prompt_tokens",
                max_tokens,
                f"all {len(lengths)} {name} prompts are longer, the shortest has {min(lengths)} tokens; raise it",
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
        """Which of these prompts are among the others, by a hash of their text."""
        theirs = set(others._hashes)
        return [index for index, one in enumerate(self._hashes) if one in theirs]

    def prompt(self, index: int, uid: str) -> Prompt:
        """The index-th prompt that was kept."""
        place = self._kept[index]
        columns = dict(self._examples[place])
        text = columns.pop("prompt")
        if self.task:
            columns["task_name"] = self.task
        return Prompt(uid, self._token_ids[place], text, columns)


def _hash(text: Text) -> int:
    return hash(text if isinstance(text, str) else tuple(tuple(sorted(message.items())) for message in text))


def tokenize(texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids: conversations through the chat template, plain text with the tokenizer's own special tokens."""
    ids: list[list[int]] = [[] for _ in texts]
    plain = [i for i, text in enumerate(texts) if isinstance(text, str)]
    chats = [i for i, text in enumerate(texts) if not isinstance(text, str)]
    if plain:
        for i, one in zip(plain, _plain_ids([str(texts[i]) for i in plain], tokenizer), strict=True):
            ids[i] = one
    if chats:
        for i, one in zip(chats, _chat_ids([texts[i] for i in chats], tokenizer), strict=True):
            ids[i] = one
    for i, one in enumerate(ids):
        if not one:
            raise ConfigError(f"task: example {i} has no token at all; give it a prompt")
    return ids


def _plain_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows: list[list[int]] = tokenizer(texts, **QUIET).input_ids
    for text, ids in zip(texts, rows, strict=True):
        # the text may begin with the token that the tokenizer adds
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        # some tokenizers end every text; a prompt goes on
        ended = ids[-2:] == [eos, eos] or (ids[-1:] == [eos] and not text.endswith(str(tokenizer.eos_token)))
        if eos is not None and len(ids) > 1 and ended:
            del ids[-1]
    return rows


def _chat_ids(chats: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError(
            "model: its tokenizer has no chat template, but the task's prompts are conversations; choose a chat "
            "model, give model.chat_template=FILE, or make the prompts plain with task.format=plain"
        )
    try:
        texts = tokenizer.apply_chat_template(list(chats), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(f"model: its chat template refuses the task's prompts: {error}") from error
    # the template writes the special tokens itself: adding them again would double the first
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, **QUIET).input_ids
    return ids


def _text(example: Example, index: int, name: str) -> Text:
    multiplier = example.get("loss_multiplier", 1.0)
    if not isinstance(multiplier, int | float) or not 0 <= multiplier < math.inf:
        raise ConfigError(
            f"task: {name} example {index} has the loss_multiplier {multiplier!r}; it must be a number of 0 or more"
        )
    prompt = example["prompt"]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            if (
                not isinstance(message, dict)
                or message.get("role") not in ROLES
                or not isinstance(message.get("content"), str)
            ):
                raise ConfigError(
                    f"task: message {message} of {name} example {index} needs a `content` and a `role` of "
                    f"{', '.join(ROLES)}"
                )
        return prompt
    raise ConfigError(f"task: {name} example {index} has the prompt {prompt!r}; it must be text or messages")
