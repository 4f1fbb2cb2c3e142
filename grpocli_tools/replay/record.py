"""The record of a step: the rows of its rollout file by group, and its line of metrics.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.runs.rollouts import read_rollouts, read_schema
from grpocli.types import Prompt, Status

IN_UPDATE = (Status.TRAINED, Status.ZERO_ADVANTAGE, Status.MASKED)
"""Statuses of the rows that a step's update had."""
TOKEN_COLUMNS = ("loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratios", "clipped")
"""Columns with one value for each token of `completion_ids`."""
REQUIRED = (
    *("step", "sampled_step", "status", "group", "uid", "prompt_ids", "completion_ids", "logprobs", "loss_mask"),
    *("finish_reason", "version"),
)
"""The columns that a replay cannot do without. None of their values is null."""

FileRow = dict[str, Any]


def commonest(values: Iterable[Any]) -> Any:
    """The most frequent value, the first of several."""
    pairs = [(json.dumps(value, sort_keys=True, default=str), value) for value in values]
    (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
    return next(value for other, value in pairs if other == key)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """The rows of one group, by their place in the file: one damaged cell does not move a row to another group.

    Values that all rows share are the most frequent ones.
    """

    number: int
    rows: list[FileRow]

    def shared(self, column: str) -> Any:
        """The value of a column that all rows of the group share."""
        return commonest(row.get(column) for row in self.rows)

    @property
    def uid(self) -> str:
        return str(self.shared("uid"))

    @property
    def in_update(self) -> bool:
        """Whether the step trained on the group."""
        return bool(commonest(row["status"] in IN_UPDATE for row in self.rows))

    @property
    def status(self) -> Status:
        """Why the step did not train on the group; TRAINED if it did."""
        return Status.TRAINED if self.in_update else Status(self.shared("status"))

    @property
    def is_leftover(self) -> bool:
        """Whether it was sampled for the step before."""
        return bool(commonest(row["sampled_step"] < row["step"] for row in self.rows))

    def prompt(self) -> Prompt:
        """The prompt as the file has it."""
        columns = json.loads(self.shared("columns") or "{}")
        messages = columns.pop("prompt", None) or self.shared("messages")
        text = messages if messages is not None else self.shared("prompt")
        task = self.shared("task")
        columns |= {"task_name": task} if task else {}
        return Prompt(self.uid, self.shared("prompt_ids"), text, columns, self.shared("row"))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step's record. metrics: its line of metrics.jsonl; None if there is none (yet)."""

    step: int
    path: Path
    groups: list[RecordedGroup]
    metrics: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path, step: int, group_size: int, metrics: dict[str, Any] | None) -> RecordedStep:
        """Read a rollout file. Raises ConfigError if its rows cannot be those of a step."""
        check_columns(path, step)
        rows = read_rollouts(path)
        for number, row in enumerate(rows):
            if damage := _damage(row):
                raise ConfigError(f"{path}: step {step}, row {number}: {damage}; {REMEDY}")
        if len(rows) % group_size:
            raise ConfigError(
                f"{path}: step {step} holds {len(rows)} completions, which are not whole groups of {group_size}: rows "
                "are missing, or rollout.group_size was different"
            )
        groups = [RecordedGroup(i, rows[i * group_size : (i + 1) * group_size]) for i in range(len(rows) // group_size)]
        return cls(step, path, groups, metrics)

    @property
    def rows(self) -> list[FileRow]:
        return [row for group in self.groups for row in group.rows]

    @property
    def trained(self) -> list[RecordedGroup]:
        """The groups of the update."""
        return [group for group in self.groups if group.in_update]

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that sampled a row; the step itself without rows."""
        return min((row["version"] for row in self.rows), default=self.step)


REMEDY = "the file is damaged: name other steps"


def check_columns(path: Path, step: int) -> None:
    """Raise ConfigError if a rollout file is broken, or a column is missing."""
    names = read_schema(path).names
    if missing := [column for column in REQUIRED if column not in names]:
        raise ConfigError(f"{path}: step {step}: the column {missing[0]} is missing; {REMEDY}")


def _damage(row: FileRow) -> str:
    """What is wrong with a row that no run has written; empty if nothing is."""
    if null := [column for column in REQUIRED if row[column] is None]:
        return f"the column {null[0]} is null"
    n = len(row["completion_ids"])
    wrong = [column for column in TOKEN_COLUMNS if row.get(column) is not None and len(row[column]) != n]
    return f"the column {wrong[0]} has {len(row[wrong[0]])} values for {n} completion_ids" if wrong else ""
