"""task=jsonl: any local file or hub dataset, with its columns mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import nearest, one_of, part, require
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.tasks.task import Example


@part("task", "jsonl")
class Jsonl:
    """Examples from .jsonl, .json, .csv or .parquet files, or from the hub.

    path: a file, a folder of files, or a name on the hub (with `name` for its configuration and `split`).
    eval_path, eval_split: where held-out problems are; without either, `eval_size` of the examples are held out.
    prompt_column: text, or a list of messages. answer_column: what rewards get as `answer` (null: there is none).
    prompt_template: text with {column} fields, instead of prompt_column.
    prefix: text before every prompt, for worked examples. system_prompt: a message before every conversation.
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

    def __post_init__(self) -> None:
        one_of(self, "format", ("auto", "plain", "chat"))
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")
        require(
            self,
            "system_prompt",
            self.system_prompt is None or self.format != "plain",
            "plain prompts have no system message; use task.prefix, or task.format=chat",
        )

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`."""
        return _examples(self, split)

    def source(self, split: str) -> tuple[str, str] | None:
        """The path and the hub's split that hold `split`; None where it has to be held out of `train`."""
        if split == "train":
            return self.path, self.split
        if self.eval_path is not None:
            return self.eval_path, self.eval_split or self.split
        return None if self.eval_split is None else (self.path, self.eval_split)

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """A hook for tasks with a format of their own: the row's columns as they should be."""
        return row


@lru_cache(maxsize=4)
def _examples(task: Jsonl, split: str) -> Sequence[Example]:
    table = _table(task, split)
    _check_columns(task, table)
    return Examples(task, table)


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Any]):
    """Rows turned into examples when they are asked for."""

    task: Jsonl
    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = self.task.convert(dict(self.table[index]))
        prompt = _prompt(self.task, row, index)
        if self.task.answer_column is not None:
            row["answer"] = row[self.task.answer_column]
        return {**row, "prompt": prompt}


def _table(task: Jsonl, split: str) -> Any:
    from grpocli.tasks.loading import load_table

    own = task.source("eval")
    path, hub_split = task.source(split) or (task.path, task.split)
    key = "task.path" if path == task.path else "task.eval_path"
    table = load_table(path, task.name, hub_split, key)
    if own is not None:
        return table
    if len(table) < 2:
        raise ConfigError.of(
            "task.path", task.path, "has one example; give two, so that one is held out, or task.eval_path"
        )
    held_out = min(task.eval_size, max(1, len(table) // 5))
    parts = table.train_test_split(test_size=held_out, seed=0, load_from_cache_file=False)
    return parts["test" if split == "eval" else "train"]


def _check_columns(task: Jsonl, table: Any) -> None:
    from grpocli.tasks.loading import need_columns

    wanted: dict[str, str | None] = {"task.answer_column": task.answer_column}
    if task.prompt_template is None:
        wanted["task.prompt_column"] = task.prompt_column
    need_columns(table, wanted, task.path)
    for _, field, _, _ in Formatter().parse(task.prompt_template or ""):
        if field is not None and field not in table.column_names:
            raise ConfigError.of(
                "task.prompt_template",
                task.prompt_template,
                f"there is no column {field!r}; {task.path} has {', '.join(table.column_names)}"
                f"{nearest(field, table.column_names)}",
            )


def _prompt(task: Jsonl, row: dict[str, Any], index: int) -> Any:
    prompt = task.prompt_template.format(**row) if task.prompt_template else row[task.prompt_column]
    if not prompt or not isinstance(prompt, str | list):
        raise ConfigError.of(
            "task.prompt_column",
            task.prompt_column,
            f"row {index} of {task.path} has {prompt!r}; a prompt is text or a list of messages",
        )
    if isinstance(prompt, str):
        prompt = task.prefix + prompt
        if task.format != "chat" and task.system_prompt is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif task.format == "plain":
        prompt = task.prefix + "\n".join(m["content"] for m in prompt)
        return prompt
    system = [] if task.system_prompt is None else [{"role": "system", "content": task.system_prompt}]
    return [*system, *prompt]
