"""task=gsm8k: grade-school word problems (arXiv 2110.14168), from the hub or from local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpocli.config.parts import part
from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Jsonl


@part("task", "gsm8k")
class Gsm8k(Jsonl):
    """7,473 problems to train on and 1,319 to evaluate on.

    path: a name on the hub, or a folder with train.jsonl and test.jsonl of columns `question` and `answer`.
    `answer` becomes the final number; the worked solution stays as `solution`.
    """

    path: str = "openai/gsm8k"
    name: str | None = "main"
    eval_split: str | None = "test"
    prompt_template: str | None = (
        "{question}\nReason step by step, and put the final answer, a number, in \\boxed{{}}."
    )
    format: str = "chat"

    def source(self, split: str) -> tuple[str, str] | None:
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            return super().source(split)
        file = folder / {"train": "train.jsonl", "eval": "test.jsonl"}[split]
        if not file.is_file():
            raise ConfigError.of("task.path", self.path, f"has no {file.name}")
        return str(file), "train"

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """The final number after "####", without commas."""
        solution, mark, answer = str(row["answer"]).rpartition("####")
        if not mark:
            raise ConfigError.of("task.path", self.path, f"the answer {row['answer']!r} has no final #### NUMBER")
        return {**row, "solution": solution.strip(), "answer": answer.strip().replace(",", "")}

