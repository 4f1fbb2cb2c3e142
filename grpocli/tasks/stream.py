"""task.streaming: the examples of data that is never read whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli.tasks.examples import Maker
from grpocli.tasks.loading import EMPTY, Row, columns_of
from grpocli.tasks.order import Order
from grpocli.tasks.rows import Rows, open_rows, with_columns
from grpocli.tasks.shots import choose, with_shots
from grpocli.tasks.text import text_hash, text_of

if TYPE_CHECKING:
    from grpocli.tasks.jsonl import Jsonl
    from grpocli.tasks.task import Example

HEAD = 100
"""So many rows say what columns there are."""


@dataclass(slots=True)
class ExampleStream:
    """The rows after the `first` ones, which are held out. apart: hashes of the prompts not to train on."""

    maker: Maker
    rows: Rows
    columns: list[str]
    first: int = 0
    held_out: list[Example] = field(default_factory=list)
    apart: set[int] = field(default_factory=set)
    _going: Iterator[Row] | None = None
    _at: int = 0

    @classmethod
    def of(cls, task: Jsonl) -> ExampleStream:
        """Raises ConfigError where there is nothing to read, or nothing to train on."""
        rows = open_rows(task.path, task.name, task.split or "", "task.path")
        columns = columns_of(list(islice(rows.read(0), HEAD)), task.path, "task.path")
        if not columns:
            raise ConfigError(EMPTY, key="task.path", value=task.path)
        made = cls(Maker.of(task, columns, task.path), rows, columns)
        if task.source("eval") is None:
            made._hold_out(task.eval_size)
        if task.shots:
            made._take_shots(task)
        made.apart.update(text_hash(one["prompt"]) for one in made.held_out)
        return made

    def take(self, start: int, n: int) -> list[Row]:
        """At most n rows from the start-th one on that is not held out. One run after the other is read once."""
        going = self._going if self._at == start else None
        self._going = None  # where reading fails, nothing goes on
        going = going or self.rows.read(self.first + start)
        found = [with_columns(row, self.columns) for row in islice(going, n)]
        self._going, self._at = going, start + len(found)
        return found

    def count(self) -> int:
        """How many rows there are, without those held out."""
        return self.rows.count() - self.first

    def example(self, row: Row, number: int) -> Example:
        """Of the number-th row that is not held out."""
        return self.maker.example(row, self.first + number)

    def where(self, number: int) -> str:
        """A row in words."""
        return self.maker.where(self.first + number)

    @property
    def head(self) -> list[Example]:
        """A few examples to train on. Raises ConfigError where one of them is none."""
        made = [self.example(row, number) for number, row in enumerate(self.take(0, HEAD))]
        for number, one in enumerate(made):
            text_of(one, self.where(number))
        return made

    def _hold_out(self, size: int) -> None:
        found: dict[int, Example] = {}
        for number, row in enumerate(self.rows.read(0)):
            example = self.maker.example(with_columns(row, self.columns), number)
            question = text_hash(example["prompt"])
            if question not in found and len(found) == size:
                self.first, self.held_out = number, list(found.values())
                return
            found.setdefault(question, example)
        problem = f"{self.maker.path} has {len(found)} different examples; lower it, so that some are left to train on"
        raise ConfigError(problem, key="task.eval_size", value=size)

    def _take_shots(self, task: Jsonl) -> None:
        rows = self.take(0, task.shuffle_buffer)
        order = Order(len(rows), task.shot_seed or 0)
        chosen = [order.index(i) for i in range(len(rows))]
        held_out = {text_hash(one["prompt"]) for one in self.held_out}
        examples = ((self.example(rows[i], i), self.where(i)) for i in chosen)
        fit = ((one, where) for one, where in examples if text_hash(one["prompt"]) not in held_out)
        shots = choose(fit, task.shots, task.shot_template, task.path)
        self.held_out = [{**one, "prompt": with_shots(one["prompt"], shots)} for one in self.held_out]
        self.apart.update(text_hash(with_shots(shot.prompt, shots)) for shot in shots)
        self.maker = replace(self.maker, shots=tuple(shots))
