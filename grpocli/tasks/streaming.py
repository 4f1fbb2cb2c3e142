"""task.streaming: rows are read, shuffled and tokenised as they are drawn, and the data is never read whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from grpocli.errors import ConfigError
from grpocli.tasks.curriculum import TRIES, Order, Position, permutation
from grpocli.tasks.dataset import RowConverter, choose, with_shots
from grpocli.tasks.loading import EMPTY, Row, RowSource, columns_of, open_rows, with_columns
from grpocli.tasks.prompt_set import settle_example
from grpocli.tasks.prompts import prompt_of, text_hash, text_of, tokenize
from grpocli.types import Prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from grpocli.environments.tools import Schema
    from grpocli.tasks.prompt_set import Targets
    from grpocli.tasks.task import Example, TableTask

logger = logging.getLogger(__name__)

HEAD = 100
"""Rows at the beginning that determine the columns."""


@dataclass
class ExampleStream:
    """The training rows of data that is read while it is drawn from."""

    converter: RowConverter
    rows: RowSource
    columns: list[str]
    first: int = 0
    """The number of rows before the training rows."""
    held_out: list[Example] = field(default_factory=list)
    """Examples to evaluate on."""
    excluded: set[int] = field(default_factory=set)
    """Hashes of prompts that are not trained on."""
    _going: Iterator[Row] | None = None
    _at: int = 0

    @classmethod
    def of(cls, task: TableTask) -> ExampleStream:
        """The stream of a task. Raises ConfigError if there is nothing to read or to train on."""
        rows = open_rows(task.path, task.name, task.split or "", "task.path", task.storage_options)
        head = list(islice(rows.read(0), HEAD))
        columns = columns_of(head)
        if not columns:
            raise ConfigError(EMPTY, key="task.path", value=task.path)
        made = cls(RowConverter.of(task, columns, head, task.path), rows, columns)
        if task.source("eval") is None:
            made._hold_out(task.eval_size)
        if task.shots:
            made._take_shots(task)
        made.excluded.update(text_hash(one["prompt"]) for one in made.held_out)
        return made

    def take(self, start: int, n: int) -> list[Row]:
        """At most n training rows from number `start`. Consecutive calls continue without a new pass."""
        going = self._going if self._at == start else None
        self._going = None  # an iterator that failed cannot be continued
        going = going or self.rows.read(self.first + start)
        found = [with_columns(row, self.columns) for row in islice(going, n)]
        self._going, self._at = going, start + len(found)
        return found

    def count(self) -> int:
        """The number of training rows."""
        return self.rows.count() - self.first

    def example(self, row: Row, number: int) -> Example:
        """The example of training row `number`."""
        return self.converter.example(row, self.first + number)

    def where(self, number: int) -> str:
        """The name of a row in errors."""
        return self.converter.where(self.first + number)

    @cached_property
    def head(self) -> list[Example]:
        """The first examples to train on. Raises ConfigError if one of them has no usable prompt."""
        made = [self.example(row, number) for number, row in enumerate(self.take(0, HEAD))]
        for number, one in enumerate(made):
            text_of(one, self.where(number))
        return made

    def _hold_out(self, size: int) -> None:
        found: dict[int, Example] = {}
        for number, row in enumerate(self.rows.read(0)):
            example = self.converter.example(with_columns(row, self.columns), number)
            question = text_hash(example["prompt"])
            if question not in found and len(found) == size:
                self.first, self.held_out = number, list(found.values())
                return
            found.setdefault(question, example)
        problem = f"{self.converter.path} has {len(found)} different examples; lower it: some are to be trained on"
        raise ConfigError(problem, key="task.eval_size", value=size)

    def _take_shots(self, task: TableTask) -> None:
        rows = self.take(0, task.shuffle_buffer)
        held_out = {text_hash(one["prompt"]) for one in self.held_out}
        chosen = Order(len(rows), task.shot_seed or 0).epoch(0).tolist()
        examples = ((self.example(rows[i], i), self.where(i)) for i in chosen)
        fit = ((one, where) for one, where in examples if text_hash(one["prompt"]) not in held_out)
        shots = choose(fit, task.shots, task.shot_template, task.path)
        self.held_out = [{**one, "prompt": with_shots(one["prompt"], shots)} for one in self.held_out]
        self.excluded.update(text_hash(with_shots(shot.prompt, shots)) for shot in shots)
        self.converter = replace(self.converter, shots=tuple(shots))


class StreamedPrompts:
    """Prompts from shuffled blocks of `block` rows; the row of draw n depends only on n, the seed and the data.

    Another row of the block replaces one that is too long or held out, and so comes twice in that epoch. Leaving the
    row out would shift every later draw. The other arguments are those of `PromptSet`.
    """

    report = ""

    def __init__(
        self,
        stream: ExampleStream,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        long_prompts: str,
        task: str,
        block: int,
        seed: tuple[int, ...],
        shuffled: bool = True,
        targets: Targets | None = None,
        tools: Sequence[Schema] = (),
        last_turn: str | None = None,
    ) -> None:
        self._targets, self._tools, self._last_turn = targets, tools, last_turn
        self._stream, self._tokenizer, self._task = stream, tokenizer, task
        self._max_tokens, self._drops = max_tokens, long_prompts == "drop"
        self.block, self._seed, self._shuffled = block, seed, shuffled
        self._excluded = set(stream.excluded)
        self._length: int | None = None  # rows of an epoch; None before its end is reached
        self._warned = False
        self._rows_at = lru_cache(maxsize=2)(lambda start: stream.take(start, block))
        self._order = lru_cache(maxsize=2)(self._ordered)
        self._values = lru_cache(maxsize=2)(self._column)

    def exclude(self, hashes: Iterable[int]) -> None:
        """Exclude prompts with these hashes from training."""
        self._excluded.update(hashes)

    def draw(self, nth: int, uid: str) -> Prompt:
        """The nth prompt of this task. Raises ConfigError if a row is unusable, or if all are excluded."""
        for number in islice(self._candidates(nth), TRIES):
            if prompt := self._prompt(number, uid):
                return prompt
        raise self.unusable()

    def unusable(self) -> ConfigError:
        """The error for many unusable rows one after the other."""
        problem = f"{TRIES} rows of {self._task} in a row are longer or held out"
        return ConfigError(problem, key="rollout.max_prompt_tokens", value=self._max_tokens, hint="raise it")

    def rows(self, epoch: int, start: int, shuffled: bool) -> NDArray[np.int64]:
        """The rows of the block that begins at `start`, in their order in an epoch; empty after the end of the data."""
        return self._stream.first + start + self._order(epoch, start, shuffled)

    def problem(self, row: int, uid: str) -> Prompt | None:
        """The prompt of a row; None if it is too long or held out, or the data has no such row."""
        number = row - self._stream.first
        start = number - number % self.block
        return self._prompt(number, uid) if 0 <= start <= number < start + len(self._rows_at(start)) else None

    def values(self, start: int, column: str) -> Mapping[int, tuple[Any, str]]:
        """{row: (its value in a column, the name of the row in errors)} of a block."""
        return self._values(start, column)

    def position(self, nth: int) -> Position:
        """The position of the shuffled order before its nth draw."""
        epoch, start, place = self._place(nth)
        return Position(epoch, start, self.rows(epoch, start, True)[:place])

    def _column(self, start: int, column: str) -> Mapping[int, tuple[Any, str]]:
        return {
            self._stream.first + n: (self._stream.example(row, n).get(column), self._where(n))
            for n, row in enumerate(self._rows_at(start), start)
        }

    def _where(self, number: int) -> str:
        return f"{self._task} example ({self._stream.where(number)})"

    def _candidates(self, nth: int) -> Iterator[int]:
        """The number of the drawn row, then of its replacements: rows of its block, then of the next blocks."""
        while True:
            epoch, start, place = self._place(nth)
            order = self._order(epoch, start, self._shuffled)
            rows = len(order)
            yield start + int(order[place])
            for i in range(rows):
                yield start + int(order[(place + rows // 2 + i) % rows])  # far from the draw of that row itself
            nth += rows - place

    def _place(self, nth: int) -> tuple[int, int, int]:
        """The epoch, the first row of the block, and the position in the block."""
        epoch, place = divmod(nth, self._length) if self._length else (0, nth)
        start, place = place - place % self.block, place % self.block
        if place < len(rows := self._rows_at(start)):
            return epoch, start, place
        self._length = start + len(rows) if rows else self._stream.count()
        return self._place(nth)

    def _ordered(self, epoch: int, start: int, shuffled: bool) -> NDArray[np.int64]:
        n = len(self._rows_at(start))
        return permutation(n, *self._seed, epoch, start) if shuffled else np.arange(n)

    def _prompt(self, number: int, uid: str) -> Prompt | None:
        start = number - number % self.block
        example = self._stream.example(self._rows_at(start)[number - start], number)
        if text_hash(example["prompt"]) in self._excluded:
            return None
        where = self._where(number)
        example, answer = settle_example(example, where, self._last_turn, self._targets)
        text = example["prompt"]
        if text_hash(text) in self._excluded:
            return None
        (ids,) = tokenize([text], self._tokenizer, lambda _: where, self._tools)
        target_ids, long_target = None, False
        if self._targets:
            (whole,) = self._targets.token_ids([text], [answer], lambda _: where)
            target_ids = whole[: self._targets.max_tokens]
            long_target = len(whole) > self._targets.max_tokens
        if self._drops and (long_target or len(ids) > self._max_tokens):
            self._warn()
            return None
        return prompt_of(example, ids[-self._max_tokens :], uid, self._task, self._stream.first + number, target_ids)

    def _warn(self) -> None:
        if not self._warned:
            targets = f", and those with a target over {self._targets.max_tokens}," if self._targets else ""
            logger.warning("prompts of %s over %d tokens%s are replaced", self._task, self._max_tokens, targets)
        self._warned = True
