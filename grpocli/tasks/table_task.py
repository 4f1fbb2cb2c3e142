"""The keys of tasks that make examples of the rows of a table."""

from __future__ import annotations

import math
import re
from dataclasses import field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import Escaped, UserCode, interpolate, one_of, require, section
from grpocli.config.user_code import check_exists
from grpocli.tasks.loading import check_path, is_one_file
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from grpocli.tasks.loading import Row

DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+(?<!\.py)")


@section("task")
class TableTask(BaseTask):
    """Keys of tasks whose examples are rows of a table."""

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
