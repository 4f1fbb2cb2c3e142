"""Examples made of a table's rows when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.tasks.loading import Row, Table, need_columns, nothing_in
from grpocli.tasks.processor import PROCESSOR, processed
from grpocli.tasks.shots import Shot, with_shots
from grpocli.tasks.text import text_hash

if TYPE_CHECKING:
    from grpocli.tasks.jsonl import Jsonl
    from grpocli.tasks.task import Example


@dataclass(frozen=True, slots=True)
class Maker:
    """What makes an example of a row of the data at `path`. shots: worked examples before every prompt."""

    task: Jsonl
    path: str
    shots: tuple[Shot, ...] = ()

    @classmethod
    def of(cls, task: Jsonl, columns: Sequence[str], path: str) -> Maker:
        """Raises ConfigError where the columns that the task names are not there."""
        from grpocli.config.user_code import load

        if task.processor:
            load(task.processor, PROCESSOR)
        else:
            task.mapping.check(columns, path)
            need_columns(columns, {"task.answer_column": task.answer_column}, path, "; or null: it has no answers")
        return cls(task, path)

    def where(self, number: int) -> str:
        """A row in words, counted from 1 as editors count lines."""
        return f"row {number + 1} of {self.path}"

    def example(self, row: Row, number: int) -> Example:
        """Raises ConfigError, naming the row, where it makes none."""
        made = self._bare(row, self.where(number))
        return {**made, "prompt": with_shots(made["prompt"], self.shots)} if self.shots else made

    def _bare(self, row: Row, where: str) -> Example:
        task = self.task
        if task.processor is not None:
            return processed(task.processor, task.processor_timeout, row, where)
        column = task.answer_column
        if column is not None and (missing := nothing_in(row[column])):
            raise ConfigError(
                f"{where} has {missing} there; fill it in, remove the row, or give null where no reward needs answers",
                key="task.answer_column",
                value=column,
            )
        row = task.convert(dict(row), where)
        prompt = task.mapping.prompt(row, where)
        if column is not None:
            row["answer"] = row[column]
        return {**row, "prompt": prompt}


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Any]):
    """Rows turned into examples when they are asked for. numbers: which rows of the table these are, ascending."""

    maker: Maker
    table: Table
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self.numbers[index]
        return self.maker.example(self.table.rows[number], number)

    def __iter__(self) -> Iterator[Any]:
        """Faster than one row after the other where all of them are wanted."""
        wanted = set(self.numbers)
        for number, row in enumerate(self.table.rows):
            if number in wanted:
                yield self.maker.example(row, number)

    def where(self, index: int) -> str:
        """An example in words."""
        return self.maker.where(self.numbers[index])

    def without(self, shots: Sequence[Shot]) -> Examples:
        """These after the worked examples, but for those that are one of them."""
        shown = {shot.question for shot in shots}
        numbers = [n for n, one in zip(self.numbers, self, strict=True) if text_hash(one["prompt"]) not in shown]
        return replace(self, numbers=numbers, maker=replace(self.maker, shots=tuple(shots)))
