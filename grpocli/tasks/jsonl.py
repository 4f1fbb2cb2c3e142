"""task=jsonl, task=hub: a local file or a dataset of the hub, with columns mapped to prompt and answer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import Escaped, UserCode, interpolate, one_of, part, require
from grpocli.config.user_code import check_exists
from grpocli.errors import ConfigError
from grpocli.tasks.loading import check_path, is_one_file
from grpocli.tasks.remote import is_remote
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from grpocli.tasks.dataset import Examples, PromptBuilder, Shot
    from grpocli.tasks.json_rows import Row
    from grpocli.tasks.streaming import ExampleStream
    from grpocli.tasks.task import Example

DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+(?<!\.py)")
SHOTS = 1
"""Seed stream of the worked examples, so that their order differs from the order of training."""


@part("task", "jsonl")
class Jsonl(BaseTask):
    """Examples from .jsonl, .json, .csv, .parquet, .arrow or .tar (webdataset) files, or from the hub."""

    path: str = MISSING
    """A file, a folder of files, either also at an address (s3://BUCKET/FOLDER, https://HOST/FILE.jsonl), or the name
    of a dataset on the hub."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of fsspec's file system for an address, such as `anon: true`. Keys and tokens belong into the
    environment instead (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL ...)."""
    name: str | None = None
    """Configuration of the dataset on the hub; null: its default."""
    split: str | None = "train"
    """Split on the hub, or the beginning of file names in a folder; a single file has no splits. null: no training
    data, the task is for `grpocli eval`, which reads a single file whole."""
    eval_path: str | None = None
    """Data to evaluate on; null: task.path. Without eval_path and eval_split, eval_size prompts are held out."""
    eval_split: str | None = None
    """Split to evaluate on. Without eval_path and eval_split, eval_size prompts are held out."""
    eval_size: int = 128
    """Different prompts to hold out, at most a fifth of all."""
    prompt_column: str = "prompt"
    """Column with the prompt, text or a list of messages. Here and elsewhere `reward_model.ground_truth` is a value
    within an object."""
    answer_column: str | None = "answer"
    """Column that rewards get as `answer`; null: none."""
    prompt_template: Escaped | None = None
    r"""Text with {column} fields, instead of prompt_column; null: none. On the command line `\n` is a line break in
    this and other texts."""
    prefix: Escaped = ""
    """Text before every prompt, such as worked examples."""
    system_prompt: Escaped | None = None
    """System message of every prompt, with which a text becomes a user message; null: none."""
    format: str = "auto"
    """`plain` text, `chat` (a text becomes a user message), or `auto`, the form that the data has."""
    processor: UserCode | None = None
    """Your function, FILE.py:NAME, module:NAME or module.NAME, instead of the columns and templates; null: none. It
    gets a row and returns a dict with `prompt`, text or messages, and the columns that rewards and environments need
    (`answer` ...). The column `loss_multiplier` multiplies the advantages of the prompt's completions, not their KL
    term."""
    processor_timeout: float = 60.0
    """Seconds for a row."""
    shots: int = 0
    """Worked examples before every prompt, as turns of a conversation or as text. They are neither trained nor
    evaluated on."""
    shot_template: Escaped = "{answer}"
    """Answer of a worked example, text with {column} fields."""
    shot_seed: int | None = interpolate("seed")
    """Seed that chooses the worked examples."""
    streaming: bool = False
    """Read training data as it is needed, and shuffle runs of shuffle_buffer rows, anew in each epoch. Without
    eval_path and eval_split, the first eval_size different prompts are held out."""
    shuffle_buffer: int = 10000
    """Rows of a shuffled run, with streaming."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "format", ("auto", "plain", "chat"))
        named = self.processor is None or ":" in self.processor or DOTTED.fullmatch(self.processor)
        require(self, "processor", bool(named), "must be FILE.py:NAME, module:NAME or a dotted path")
        require(self, "processor_timeout", 0 < self.processor_timeout < math.inf, "must be above 0 seconds")
        for name, least, more in (
            ("eval_size", 1, "; eval.problems=0 evaluates on none, and task.eval_path=FILE on other data"),
            ("shuffle_buffer", 1, ""),
            ("shots", 0, ""),
        ):
            require(self, name, getattr(self, name) >= least, f"must be at least {least}{more}")
        known = bool(self.split or self.eval_path or self.eval_split) or is_one_file(self.path)
        require(self, "split", known, "name a split to train on, or with task.eval_split one to evaluate on")
        require(
            self,
            "system_prompt",
            self.system_prompt is None or self.format != "plain",
            "plain prompts have no system message; use task.prefix, or task.format=chat",
        )

    def check_ready(self) -> None:
        super().check_ready()
        if self.processor:
            check_exists(self.processor, "task.processor")
        for key, path in (("task.path", self.path), ("task.eval_path", self.eval_path)):
            if path is not None:
                check_path(path, key)

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
        return _taught(self)

    @cached_property
    def halves(self) -> tuple[Examples, Examples]:
        """The table at `path`, divided into training and evaluation."""
        return _held_out(self)

    @cached_property
    def _read(self) -> dict[str, Examples]:
        return {}

    def source(self, split: str) -> tuple[str, str] | None:
        """The path and split of `train` or `eval`; None if eval is held out of train."""
        if split == "train":
            return self.path, self.split or ""
        if self.eval_path is not None:
            return self.eval_path, self.eval_split or self.split or ""
        if self.eval_split is None:
            return None if self.split else (self.path, "")
        return self.path, self.eval_split

    def convert(self, row: Row, where: str) -> Row:
        """The row with the columns that the task needs; a hook for derived tasks. where: the row's name in errors."""
        return row

    @property
    def mapping(self) -> PromptBuilder:
        from grpocli.tasks.dataset import PromptBuilder

        return PromptBuilder(
            self.prompt_column, self.prompt_template, self.prefix, self.system_prompt, self.format, self.last_turn
        )


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
    from grpocli.tasks.loading import load_table
    from grpocli.tasks.streaming import HEAD, load_streamed

    ours = path == task.path
    far = task.streaming and not is_remote(path) and not Path(path).expanduser().exists()
    load = load_streamed if far else load_table
    key = "task.path" if ours else "task.eval_path"
    table = load(path, task.name if ours else None, split, key, task.storage_options)
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


def _held_out(task: Jsonl) -> tuple[Examples, Examples]:
    from grpocli.tasks.dataset import hold_out

    source = task.source("train")
    assert source is not None
    everything = _all(task, *source)
    table = everything.table
    if len(table.rows) < 2:
        raise ConfigError(
            "has one example; give two, so that one is held out, or give task.eval_path",
            key="task.path",
            value=task.path,
            hint="a .json is a list of objects, or an object a line",
        )
    columns = table.columns if task.processor else task.mapping.columns
    train, evaluate = hold_out(table.rows, columns, task.eval_size)
    return replace(everything, numbers=train), replace(everything, numbers=evaluate)


def _taught(task: Jsonl) -> list[Shot]:
    from grpocli.tasks.dataset import choose
    from grpocli.tasks.order import Order

    if task.streaming:
        return list(task.stream.converter.shots)
    train = task.bare("train")
    order = Order(len(train), task.shot_seed or 0, SHOTS)
    chosen = (order.index(i) for i in range(len(train)))
    return choose(((train[i], train.where(i)) for i in chosen), task.shots, task.shot_template, task.path)
