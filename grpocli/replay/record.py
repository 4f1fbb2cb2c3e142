"""The record of a step: the rows of its rollout file by group, and its line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.errors import RunError
from grpocli.tracking.rollouts import read_rollouts
from grpocli.types import Completion, Prompt, Status

IN_UPDATE = (Status.TRAINED, Status.ZERO_ADVANTAGE, Status.MASKED)
"""Statuses of the rows that a step's update had."""
TOKEN_COLUMNS = ("loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratios", "clipped")
"""Columns with one value for each token of `completion_ids`."""
KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "sampled_step": int,
    "status": str,
    "group": int,
    "uid": str,
    "prompt_ids": list,
    "completion_ids": list,
    "logprobs": list,
    "loss_mask": list,
    "finish_reason": str,
    "version": int,
}
"""The columns that a replay cannot do without, and their types."""

Row = dict[str, Any]


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
    rows: list[Row]

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
        return Prompt(self.uid, self.shared("prompt_ids"), text, columns | ({"task_name": task} if task else {}))

    def completions(self) -> list[Completion]:
        """The completions as the file has them."""
        return [completion_of(row) for row in self.rows]


def completion_of(row: Row) -> Completion:
    """The completion of a row as the file has it, without its episode."""
    spans = [(version, n) for version, n in row["version_spans"]] if row.get("version_spans") else None
    mask = row["loss_mask"] if any(row["loss_mask"]) and not all(row["loss_mask"]) else None
    return Completion(row["completion_ids"], row["logprobs"], row["finish_reason"], row["version"], mask, spans)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step's record. metrics: its line of metrics.jsonl; None if there is none (yet)."""

    step: int
    path: Path
    groups: list[RecordedGroup]
    metrics: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path, step: int, group_size: int, metrics: dict[str, Any] | None) -> RecordedStep:
        """Read a rollout file. Raises RunError if its rows cannot be those of a step."""
        rows = read_rollouts(path)
        for number, row in enumerate(rows):
            _check(row, f"{path}: row {number}")
        if len(rows) % group_size:
            raise RunError(
                f"{path}: holds {len(rows)} completions, which are not whole groups of {group_size}: rows are missing, "
                "or rollout.group_size was another one"
            )
        groups = [RecordedGroup(i, rows[i * group_size : (i + 1) * group_size]) for i in range(len(rows) // group_size)]
        return cls(step, path, groups, metrics)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def trained(self) -> list[RecordedGroup]:
        """The groups of the update."""
        return [group for group in self.groups if group.in_update]

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that sampled a row; the step itself without rows."""
        return min((row["version"] for row in self.rows), default=self.step)

    def reward_names(self) -> list[str]:
        names = [name for row in self.rows[:1] for name in row if name.startswith("reward/")]
        return [name.removeprefix("reward/") for name in names]


def _check(row: Row, where: str) -> None:
    for column, kind in KINDS.items():
        if not isinstance(row.get(column), kind):
            raise RunError(
                f"{where} has {row.get(column)!r:.60} for {column}: the file is damaged, or of an old version"
            )
    n = len(row["completion_ids"])
    lengths = {column: len(row[column]) for column in TOKEN_COLUMNS if isinstance(row.get(column), list)}
    if wrong := [column for column, length in lengths.items() if length != n]:
        raise RunError(f"{where} has {lengths[wrong[0]]} {wrong[0]} for {n} completion_ids")
    if not n or not row["prompt_ids"]:
        raise RunError(f"{where} has no {'tokens' if row['prompt_ids'] else 'prompt_ids'}")
    for column in ("prompt_ids", "completion_ids"):
        if not _whole(row[column]):
            raise RunError(f"{where} has a value in {column} that is no token id")
    if not all(isinstance(value, float) and math.isfinite(value) for value in row["logprobs"]):
        raise RunError(f"{where} has a value in logprobs that is no finite number")
    if row["status"] not in list(Status):
        raise RunError(f"{where} has the unknown status {row['status']!r:.60}")


def _whole(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)
