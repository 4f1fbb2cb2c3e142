"""task=jsonl, task=hub: any local file or hub dataset, with its columns mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import one_of, part, require
from grpocli.errors import ConfigError
from grpocli.tasks.processor import processed
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from grpocli.tasks.loading import Row, Table
    from grpocli.tasks.mapping import Mapping
    from grpocli.tasks.task import Example


@part("task", "jsonl")
class Jsonl(BaseTask):
    """Examples from .jsonl, .json, .csv or .parquet files, or from the hub.

    path: a file, a folder of files, or a name on the hub (with `name`, its configuration).
    split: which of the hub's splits, or which of a folder's files by their names; a single file has none.
    eval_path, eval_split: where held-out problems are. Without either, `eval_size` different prompts are held
        out, at most a fifth of them.
    prompt_column: text, or a list of messages. answer_column: what rewards get as `answer` (null: there is none).
    prompt_template: text with {column} fields, instead of prompt_column.
    prefix: text before every prompt, for worked examples.
    system_prompt: the system message of every prompt, which makes a text a user's message.
    processor: a function of yours, FILE.py:NAME or module:NAME, instead of the columns and templates: it gets a row and
        returns `prompt`, text or messages, and whatever rewards and environments want (`answer` ...). With
        `loss_multiplier` the advantages of that prompt's completions are multiplied (0: not trained on).
    format: `plain` text, `chat` (a text becomes a user's message), or `auto`: as the data has it.
    """

    path: str = MISSING
    name: str | None = None
    split: str = "train"
    eval_path: str | None = None
    eval_split: str | None = None
    eval_size: int = 128
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    prompt_template: str | None = None
    prefix: str = ""
    system_prompt: str | None = None
    format: str = "auto"
    processor: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "format", ("auto", "plain", "chat"))
        named = self.processor is None or ":" in self.processor
        require(self, "processor", named, "must be FILE.py:NAME or module:NAME")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")
        require(
            self,
            "system_prompt",
            self.system_prompt is None or self.format != "plain",
            "plain prompts have no system message; use task.prefix, or task.format=chat",
        )

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`."""
        if split not in self._loaded:
            self._loaded[split] = _examples(self, split)
        return self._loaded[split]

    @cached_property
    def _loaded(self) -> dict[str, Sequence[Example]]:
        return {}

    @cached_property
    def _halves(self) -> tuple[Examples, Examples]:
        return _held_out(self)

    def source(self, split: str) -> tuple[str, str] | None:
        """The path, and the split there, of `train` or `eval`; None where eval has to be held out of train."""
        if split == "train":
            return self.path, self.split
        if self.eval_path is not None:
            return self.eval_path, self.eval_split or self.split
        return None if self.eval_split is None else (self.path, self.eval_split)

    def convert(self, row: Row, where: str) -> Row:
        """A hook for data with a format of its own: the row's columns as they should be.

        `where` is for a ConfigError about it.
        """
        return row

    @property
    def mapping(self) -> Mapping:
        from grpocli.tasks.mapping import Mapping

        return Mapping(self.prompt_column, self.prompt_template, self.prefix, self.system_prompt, self.format)


@part("task", "hub")
class Hub(Jsonl):
    """The same as `jsonl`, under the name that fits `task.path=OWNER/DATASET`."""


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Any]):
    """Rows turned into examples when they are asked for. numbers: which rows of the table these are."""

    task: Jsonl
    mapping: Mapping
    table: Table
    numbers: Sequence[int]
    path: str

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = self.numbers[index]
        return self._example(self.table.rows[number], number)

    def __iter__(self) -> Iterator[Any]:
        """Faster than one row after the other where all of them are wanted."""
        wanted = set(self.numbers)
        for number, row in enumerate(self.table.rows):
            if number in wanted:
                yield self._example(row, number)

    def _example(self, row: Row, number: int) -> Example:
        where = f"row {number} of {self.path}"
        if self.task.processor is not None:
            return processed(self.task.processor, row, where)
        row = self.task.convert(dict(row), where)
        prompt = self.mapping.prompt(row, where)
        if self.task.answer_column is not None:
            row["answer"] = row[self.task.answer_column]
        return {**row, "prompt": prompt}


def _examples(task: Jsonl, split: str) -> Examples:
    from grpocli.tasks.loading import load_table

    source = task.source(split)
    if source is None:
        return task._halves[1]
    if split == "train" and task.source("eval") is None:
        return task._halves[0]
    path, table_split = source
    if split == "eval":
        _refuse_overlap(task, path, table_split)
    ours = path == task.path
    table = load_table(path, task.name if ours else None, table_split, "task.path" if ours else "task.eval_path")
    return _mapped(task, table, path)


def _refuse_overlap(task: Jsonl, path: str, table_split: str) -> None:
    if path == task.path and (table_split == task.split or Path(path).expanduser().is_file()):
        raise ConfigError.of(
            "task.eval_split",
            task.eval_split,
            f"{path} would give the examples to train on; give another split or task.eval_path, or leave both null",
        )


def _held_out(task: Jsonl) -> tuple[Examples, Examples]:
    from grpocli.tasks.hold_out import hold_out
    from grpocli.tasks.loading import load_table

    table = load_table(task.path, task.name, task.split)
    everything = _mapped(task, table, task.path)
    if len(table.rows) < 2:
        raise ConfigError.of(
            "task.path", task.path, "has one example; give two, so that one is held out, or give task.eval_path"
        )
    columns = table.columns if task.processor else task.mapping.columns
    train, evaluate = hold_out(table.rows, columns, task.eval_size)
    return replace(everything, numbers=train), replace(everything, numbers=evaluate)


def _mapped(task: Jsonl, table: Table, path: str) -> Examples:
    from grpocli.config.user_code import load
    from grpocli.tasks.loading import need_columns
    from grpocli.tasks.processor import PROCESSOR

    if task.processor:
        load(task.processor, PROCESSOR)
        return Examples(task, task.mapping, table, range(len(table.rows)), path)
    task.mapping.check(table.columns, path)
    need_columns(table.columns, {"task.answer_column": task.answer_column}, path, "; or null: it has no answers")
    return Examples(task, task.mapping, table, range(len(table.rows)), path)
