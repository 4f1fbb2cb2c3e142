"""The prompts of a split, tokenised once at the start, none longer than the limit; and their targets, if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.tasks.prompts import prompt_of, text_hash, tokenize
from grpocli.tasks.targets import settle_example
from grpocli.types import Prompt, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.environments.tools import Schema
    from grpocli.tasks.targets import Target, Targets
    from grpocli.tasks.task import Example


class PromptSet:
    """The examples of one split as token ids.

    task: name of the task, which every prompt has as the column `task_name`. limit: limit of examples, from the first.
    Prompts over `max_tokens` are dropped (`long_prompts="drop"`) or lose their beginning (`"truncate"`). n_dropped,
    n_truncated: their numbers; report: a sentence about them, empty if there are none.
    tools: schemas that the chat template shows to the model. last_turn: `task.last_turn`.
    targets: of supervised training. Examples with a longer target are dropped, too, or the target loses its end.
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
        targets: Targets | None = None,
        tools: Sequence[Schema] = (),
        last_turn: str | None = None,
    ) -> None:
        self.name, self.max_tokens, self.task, self._last_turn = name, max_tokens, task, last_turn
        self._examples, self._targets = examples, targets
        self._drops = long_prompts == "drop"
        texts, answers = self._texts(limit)
        token_ids = tokenize(texts, tokenizer, self._where, tools)
        long = {i for i, ids in enumerate(token_ids) if len(ids) > max_tokens}
        if self._drops and len(long) == len(token_ids):
            raise ConfigError(
                f"all {len(long)} {name} prompts are longer, the shortest has {min(map(len, token_ids))} tokens",
                key="rollout.max_prompt_tokens",
                value=max_tokens,
                hint="raise it",
            )
        self.n_dropped, self.n_truncated = (len(long), 0) if self._drops else (0, len(long))
        self._total, left_out = len(token_ids), long if self._drops else set()
        self._target_ids: dict[int, list[int]] = {}
        self.n_long_targets = 0
        if targets:
            left_out = left_out | self._take_targets(targets, texts, answers, left_out)
        self._kept = [i for i in range(len(token_ids)) if i not in left_out]
        self._token_ids = {i: token_ids[i][-max_tokens:] for i in self._kept}
        self.hashes = [text_hash(texts[i]) for i in self._kept]

    def _take_targets(
        self, targets: Targets, texts: Sequence[Text], answers: Sequence[Target], left_out: set[int]
    ) -> set[int]:
        """Tokenise the targets. Returns the examples to leave out because theirs is too long."""
        every = targets.token_ids(texts, answers, self._where)
        long = {i for i, ids in enumerate(every) if len(ids) > targets.max_tokens} - left_out
        self.n_long_targets = len(long)
        self._target_ids = {
            i: ids[: targets.max_tokens] for i, ids in enumerate(every) if not (self._drops and i in long)
        }
        if not (self._drops and targets.required):
            return set()
        if len(long) + len(left_out) == len(texts):
            shortest = min(len(every[i]) for i in long)
            raise ConfigError(
                f"all {len(long)} {self.name} targets are longer, the shortest has {shortest} tokens",
                key="rollout.max_completion_tokens",
                value=targets.max_tokens,
                hint="raise it",
            )
        return long

    def _texts(self, limit: int | None) -> tuple[list[Text], list[Target]]:
        """The prompts of the first `limit` examples and, if wanted, their targets."""
        pairs = [self._settled(example, i) for i, example in enumerate(islice(self._examples, limit))]
        return [example["prompt"] for example, _ in pairs], [target for _, target in pairs]

    def _settled(self, example: Example, index: int) -> tuple[Example, Target]:
        return settle_example(example, self._where(index), self._last_turn, self._targets)

    @property
    def report(self) -> str:
        sentences = []
        if self.n_dropped + self.n_truncated:
            what = "dropped" if self.n_dropped else "cut on the left"
            sentences.append(
                f"{self.n_dropped + self.n_truncated} of {self._total} {self.name} prompts are longer than "
                f"rollout.max_prompt_tokens={self.max_tokens} and were {what}"
            )
        if self._targets and self.n_long_targets:
            dropped = "dropped" if self._targets.required else "left out of eval/loss"
            what = dropped if self._drops else "cut at the end"
            sentences.append(
                f"{self.n_long_targets} of {self._total} {self.name} targets are longer than "
                f"rollout.max_completion_tokens={self._targets.max_tokens} and were {what}"
            )
        return "; ".join(sentences)

    def __len__(self) -> int:
        return len(self._kept)

    def shared_with(self, others: PromptSet) -> list[int]:
        """Indices of the prompts that are also among `others`, by a hash of their text."""
        theirs = set(others.hashes)
        return [index for index, one in enumerate(self.hashes) if one in theirs]

    def prompt(self, index: int, uid: str) -> Prompt:
        """The index-th kept prompt."""
        place = self._kept[index]
        example, _ = self._settled(self._examples[place], place)
        ids, target_ids = self._token_ids[place], self._target_ids.get(place)
        return prompt_of(example, ids, uid, self.task, self._numbers[place], target_ids)

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
