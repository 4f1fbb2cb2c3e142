"""task=gsm8k: grade-school word problems (arXiv 2110.14168), from the hub or from local files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.config.parts import Escaped, part
from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Jsonl
from grpocli.tasks.loading import is_one_file

if TYPE_CHECKING:
    from grpocli.tasks.loading import Row


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
