"""The record of a step: the rows of its rollout file by group, and its line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.runs.rollouts import read_rollouts, read_schema, rollout_schema
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

    def check_tokens(self, vocabulary: int) -> None:
        """Raise ConfigError for a token that a model with this many tokens does not have."""
        for number, row in enumerate(self.rows):
            for column in ("prompt_ids", "completion_ids"):
                if (largest := max(row[column])) >= vocabulary:
                    problem = f"the column {column} has the token {largest}, and the model has {vocabulary}"
                    raise ConfigError(f"{self.path}: step {self.step}, row {number}: {problem}; {REMEDY}")


REMEDY = "the file is damaged: name other steps"


def check_columns(path: Path, step: int) -> None:
    """Raise ConfigError if a rollout file is broken, or a column is missing or has another type."""
    schema = read_schema(path)
    rewards = [name.removeprefix("reward/") for name in schema.names if name.startswith("reward/")]
    for column in rollout_schema(rewards):
        kind = _kind(column.type)
        if column.name not in schema.names:
            if column.name in REQUIRED:
                raise ConfigError(f"{path}: step {step}: the column {column.name} is missing; {REMEDY}")
        elif _kind(found := schema.field(column.name).type) not in (kind, kind.replace("number", "integer"), "null"):
            problem = f"the column {column.name} has the type {found}, not {kind}"
            raise ConfigError(f"{path}: step {step}: {problem}; {REMEDY}")


def _kind(arrow_type: Any) -> str:
    """The type of a column, in words: the size of numbers does not matter."""
    from pyarrow import types

    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return f"list of {_kind(arrow_type.value_type)}"
    tests = {
        "integer": types.is_integer,
        "number": types.is_floating,
        "text": lambda one: types.is_string(one) or types.is_large_string(one),
        "null": types.is_null,
    }
    return next((kind for kind, holds in tests.items() if holds(arrow_type)), str(arrow_type))


def _damage(row: FileRow) -> str:
    """What is wrong with a row that no run has written; empty if nothing is."""
    if null := [column for column in REQUIRED if row[column] is None]:
        return f"the column {null[0]} is null"
    for column, value in row.items():
        if isinstance(value, list) and None in value:
            return f"the column {column} has null in its list"
    n = len(row["completion_ids"])
    for column in TOKEN_COLUMNS:
        if row.get(column) is not None and len(row[column]) != n:
            return f"the column {column} has {len(row[column])} values for {n} completion_ids"
    for column in ("prompt_ids", "completion_ids"):
        if not row[column] or min(row[column]) < 0:
            return f"the column {column} {'has a negative token id' if row[column] else 'is empty'}"
    if not all(map(math.isfinite, row["logprobs"])):
        return "the column logprobs has a value that is not finite"
    if row["status"] not in list(Status):
        return f"the column status has the unknown value {row['status']!r:.60}"
    if not all(len(span) == 2 for span in row.get("version_spans") or []):
        return "the column version_spans has an entry that is not a pair of a version and a number of tokens"
    return _damage_of_example(row)


def _damage_of_example(row: Mapping[str, Any]) -> str:
    """What is wrong with the column of the example's data; empty if nothing is."""
    try:
        columns = json.loads(row.get("columns") or "{}")
    except (ValueError, RecursionError) as error:
        return f"the column columns is not JSON ({error})"
    return "" if isinstance(columns, dict) else "the column columns is not a JSON object"
