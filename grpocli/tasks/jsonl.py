"""task=jsonl, task=hub: rows of files or of the hub as examples; task=gsm8k, task=code: those of known datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.config.parts import Escaped, part
from grpocli.errors import ConfigError
from grpocli.tasks.loading import is_one_file, load_table
from grpocli.tasks.task import TableTask

if TYPE_CHECKING:
    from grpocli.tasks.dataset import Examples, Shot
    from grpocli.tasks.loading import Row
    from grpocli.tasks.streaming import ExampleStream
    from grpocli.tasks.task import Example

SHOTS = 1
"""Seed stream of the worked examples, so that their order differs from the order of training."""


class Splits(dict[str, "Examples"]):
    """The examples of each split, read when they are first asked for."""

    def __init__(self, read: Callable[[str], Examples]) -> None:
        super().__init__()
        self.read = read

    def __missing__(self, split: str) -> Examples:
        self[split] = self.read(split)
        return self[split]


@part("task", "jsonl")
class Jsonl(TableTask):
    """Examples from .jsonl, .json, .csv, .parquet, .arrow or .tar (webdataset) files, or from the hub."""

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; with `streaming`, only the first ones of `train`."""
        if split == "train" and self.split is None:
            problem = "the task is for `grpocli eval`; name a split to train on"
            raise ConfigError(problem, key="task.split", value="null")
        if self.streaming and (split == "train" or self.source("eval") is None):
            return self.stream.head if split == "train" else self.stream.held_out
        return self._taught[split] if self.shots else self._bare[split]

    @cached_property
    def stream(self) -> ExampleStream:
        """The training data, with `streaming`."""
        from grpocli.tasks.streaming import ExampleStream

        return ExampleStream.of(self)

    @cached_property
    def _bare(self) -> Splits:
        """The examples of each split that is read whole, without worked examples."""
        return Splits(self._halves.__getitem__ if self.source("eval") is None else self._whole)

    @cached_property
    def _taught(self) -> Splits:
        """The examples of each split, with worked examples before their prompts."""
        return Splits(self._with_shots)

    def _whole(self, split: str) -> Examples:
        """All examples of a split of data that has splits."""
        path, table_split = self.source(split) or ("", "")
        same = path == self.path and (table_split == self.split or is_one_file(path))
        if split == "eval" and self.split is not None and same:
            problem = f"{path} would give the examples to train on"
            hint = "give another split or task.eval_path, or leave both null"
            raise ConfigError(problem, key="task.eval_split", value=self.eval_split, hint=hint)
        return self._table(path, table_split)

    def _table(self, path: str, split: str) -> Examples:
        from grpocli.tasks.dataset import Examples, RowConverter
        from grpocli.tasks.streaming import HEAD

        ours = path == self.path
        name, key = (self.name, "task.path") if ours else (None, "task.eval_path")
        far = self.streaming and not Path(path).expanduser().exists()
        table = load_table(path, name, split, key, self.storage_options, streaming=far)
        converter = RowConverter.of(self, table.columns, islice(table.rows, HEAD), path)
        return Examples(converter, table, range(len(table.rows)))

    def _with_shots(self, split: str) -> Examples:
        found = self._bare[split].without(self._shots)
        if not found:
            problem = f"no example is left for {split}; take fewer, or other data"
            raise ConfigError(problem, key="task.shots", value=self.shots)
        return found

    @cached_property
    def _shots(self) -> Sequence[Shot]:
        """The worked examples."""
        from grpocli.tasks.curriculum import Order
        from grpocli.tasks.dataset import choose

        if self.streaming:
            return list(self.stream.converter.shots)
        train = self._bare["train"]
        order = Order(len(train), self.shot_seed or 0, SHOTS)
        chosen = (order.index(i) for i in range(len(train)))
        return choose(((train[i], train.where(i)) for i in chosen), self.shots, self.shot_template, self.path)

    @cached_property
    def _halves(self) -> dict[str, Examples]:
        """The table at `path`, divided into training and evaluation."""
        from grpocli.tasks.dataset import PromptBuilder, hold_out

        everything = self._table(self.path, self.split or "")
        table = everything.table
        if len(table.rows) < 2:
            problem = "has one example; give two, so that one is held out, or give task.eval_path"
            raise ConfigError(problem, key="task.path", value=self.path)
        columns = table.columns if self.processor else PromptBuilder(self).columns
        train, evaluate = hold_out(table.rows, columns, self.eval_size)
        return {"train": replace(everything, numbers=train), "eval": replace(everything, numbers=evaluate)}


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
