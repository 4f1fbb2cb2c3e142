"""task=jsonl, task=hub: a local file or a dataset of the hub, with columns mapped to prompt and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.config.parts import part
from grpocli.errors import ConfigError
from grpocli.tasks.loading import is_one_file, is_remote, load_table
from grpocli.tasks.table_task import TableTask

if TYPE_CHECKING:
    from grpocli.tasks.dataset import Examples, Shot
    from grpocli.tasks.streaming import ExampleStream
    from grpocli.tasks.task import Example

SHOTS = 1
"""Seed stream of the worked examples, so that their order differs from the order of training."""


@part("task", "jsonl")
class Jsonl(TableTask):
    """Examples from .jsonl, .json, .csv, .parquet, .arrow or .tar (webdataset) files, or from the hub."""

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; with `streaming`, only the first ones of `train`."""
        if split == "train" and self.split is None:
            raise ConfigError(
                "the task is for `grpocli eval`; name a split to train on",
                key="task.split",
                value="null",
            )
        if split not in self._loaded:
            self._loaded[split] = _examples(self, split)
        return self._loaded[split]

    @cached_property
    def _loaded(self) -> dict[str, Sequence[Example]]:
        return {}

    @cached_property
    def stream(self) -> ExampleStream:
        """The training data, with `streaming`."""
        from grpocli.tasks.streaming import ExampleStream

        return ExampleStream.of(self)

    def bare(self, split: str) -> Examples:
        """The examples of a split that is read whole, without worked examples."""
        if split not in self._read:
            self._read[split] = _bare(self, split)
        return self._read[split]

    @cached_property
    def taught(self) -> Sequence[Shot]:
        """The worked examples."""
        from grpocli.tasks.dataset import choose
        from grpocli.tasks.order import Order

        if self.streaming:
            return list(self.stream.converter.shots)
        train = self.bare("train")
        order = Order(len(train), self.shot_seed or 0, SHOTS)
        chosen = (order.index(i) for i in range(len(train)))
        return choose(((train[i], train.where(i)) for i in chosen), self.shots, self.shot_template, self.path)

    @cached_property
    def halves(self) -> tuple[Examples, Examples]:
        """The table at `path`, divided into training and evaluation."""
        from grpocli.tasks.dataset import PromptBuilder, hold_out

        everything = _all(self, self.path, self.split or "")
        table = everything.table
        if len(table.rows) < 2:
            raise ConfigError(
                "has one example; give two, so that one is held out, or give task.eval_path",
                key="task.path",
                value=self.path,
                hint="a .json is a list of objects, or an object a line",
            )
        columns = table.columns if self.processor else PromptBuilder(self).columns
        train, evaluate = hold_out(table.rows, columns, self.eval_size)
        return replace(everything, numbers=train), replace(everything, numbers=evaluate)

    @cached_property
    def _read(self) -> dict[str, Examples]:
        return {}


@part("task", "hub")
class Hub(Jsonl):
    """The same as `jsonl`, under the name that fits `task.path=OWNER/DATASET`."""


def _examples(task: Jsonl, split: str) -> Sequence[Example]:
    if task.streaming and (split == "train" or task.source("eval") is None):
        return task.stream.head if split == "train" else task.stream.held_out
    if not task.shots:
        return task.bare(split)
    found = task.bare(split).without(task.taught)
    if not found:
        raise ConfigError(
            f"no example is left for {split}; take fewer, or other data", key="task.shots", value=task.shots
        )
    return found


def _bare(task: Jsonl, split: str) -> Examples:
    source = task.source(split)
    if task.source("eval") is None:
        return task.halves[split == "eval"]
    assert source is not None
    path, table_split = source
    if split == "eval":
        _refuse_overlap(task, path, table_split)
    return _all(task, path, table_split)


def _all(task: Jsonl, path: str, split: str) -> Examples:
    from grpocli.tasks.dataset import Examples, RowConverter
    from grpocli.tasks.streaming import HEAD

    ours = path == task.path
    far = task.streaming and not is_remote(path) and not Path(path).expanduser().exists()
    key = "task.path" if ours else "task.eval_path"
    table = load_table(path, task.name if ours else None, split, key, task.storage_options, streaming=far)
    return Examples(RowConverter.of(task, table.columns, islice(table.rows, HEAD), path), table, range(len(table.rows)))


def _refuse_overlap(task: Jsonl, path: str, table_split: str) -> None:
    if task.split is None:
        return
    if path == task.path and (table_split == task.split or is_one_file(path)):
        raise ConfigError(
            f"{path} would give the examples to train on; give another split or task.eval_path, or leave both null",
            key="task.eval_split",
            value=task.eval_split,
        )
