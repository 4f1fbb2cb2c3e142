"""task=jsonl, task=hub: rows of files or of the hub as examples; task=gsm8k, task=code: those of known datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.config.parts import Escaped, part
from grpocli.errors import ConfigError
from grpocli.tasks.loading import is_one_file, load_table
from grpocli.tasks.table_task import TableTask

if TYPE_CHECKING:
    from grpocli.tasks.dataset import Examples, Shot
    from grpocli.tasks.loading import Row
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
            self._loaded[split] = self._examples(split)
        return self._loaded[split]

    def _examples(self, split: str) -> Sequence[Example]:
        if self.streaming and (split == "train" or self.source("eval") is None):
            return self.stream.head if split == "train" else self.stream.held_out
        if not self.shots:
            return self.bare(split)
        found = self.bare(split).without(self.taught)
        if not found:
            problem = f"no example is left for {split}; take fewer, or other data"
            raise ConfigError(problem, key="task.shots", value=self.shots)
        return found

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
            self._read[split] = self._bare(split)
        return self._read[split]

    def _bare(self, split: str) -> Examples:
        if self.source("eval") is None:
            return self.halves[split == "eval"]
        source = self.source(split)
        assert source is not None
        path, table_split = source
        same = path == self.path and (table_split == self.split or is_one_file(path))
        if split == "eval" and self.split is not None and same:
            raise ConfigError(
                f"{path} would give the examples to train on; give another split or task.eval_path, or leave both null",
                key="task.eval_split",
                value=self.eval_split,
            )
        return self._table(path, table_split)

    def _table(self, path: str, split: str) -> Examples:
        """All examples of a split."""
        from grpocli.tasks.dataset import Examples, RowConverter
        from grpocli.tasks.streaming import HEAD

        ours = path == self.path
        name, key = (self.name, "task.path") if ours else (None, "task.eval_path")
        far = self.streaming and not Path(path).expanduser().exists()
        table = load_table(path, name, split, key, self.storage_options, streaming=far)
        converter = RowConverter.of(self, table.columns, islice(table.rows, HEAD), path)
        return Examples(converter, table, range(len(table.rows)))

    @cached_property
    def taught(self) -> Sequence[Shot]:
        """The worked examples."""
        from grpocli.tasks.curriculum import Order
        from grpocli.tasks.dataset import choose

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

        everything = self._table(self.path, self.split or "")
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


@part("task", "gsm8k")
class Gsm8k(Jsonl):
    """GSM8K (arXiv 2110.14168): 7,473 problems to train on and 1,319 to evaluate on.

    The data has the columns `question` and `answer`. `answer` becomes the final number; the worked solution stays as
    `solution`.
    """

    path: str = "openai/gsm8k"
    """A name on the hub, a folder with train.jsonl and test.jsonl, or one file, part of which is held out."""
    name: str | None = "main"
    eval_split: str | None = "test"
    prompt_template: Escaped | None = (
        "{question}\nReason step by step, and put the final answer, a number, in \\boxed{{}}."
    )
    format: str = "chat"
    shot_template: Escaped = "{solution}\nThe answer is \\boxed{{{answer}}}."

    def source(self, split: str) -> tuple[str, str] | None:
        if split == "eval" and self.eval_path is None and is_one_file(self.path):
            return None
        return super().source(split)

    def convert(self, row: Row, where: str) -> Row:
        """`answer` becomes the final number after "####", without commas; the text before it becomes `solution`."""
        if self.answer_column is None:
            return row
        solution, mark, answer = str(row[self.answer_column]).rpartition("####")
        if not mark or not answer.strip():
            problem = f"{where} has no final #### NUMBER in its answer {row[self.answer_column]!r}"
            raise ConfigError(problem, key="task")
        return {**row, "solution": solution.strip(), self.answer_column: answer.strip().replace(",", "")}


@part("task", "code")
class CodeProblems(Jsonl):
    """Programming problems with the column `tests` for reward=[code].

    Further columns: `setup` (code before the tests), `before` (code before the program), `answer` (a right program).
    Rows in the form of MBPP (`test_list`, `code`; arXiv 2108.07732) and of HumanEval (`test`, `entry_point`,
    `canonical_solution`; arXiv 2107.03374) are converted to these columns.
    """

    format: str = "chat"

    def convert(self, row: Row, where: str) -> Row:
        """The row with the column `tests`. Raises ConfigError if it has none."""
        if tests := row.get("test_list"):
            setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
            shown = tests if isinstance(tests, str) else "\n".join(tests)  # one text, for the prompt
            return {**row, "tests": tests, "setup": "\n".join(setup), "test_list": shown}
        if tests := row.get("test"):
            return {**row, "tests": tests, "before": (row.get("entry_point") and row.get("prompt")) or ""}
        if not row.get("tests"):
            problem = f"{where} has no tests: needs the column tests, test_list or test"
            raise ConfigError(problem, key="task")
        return row
