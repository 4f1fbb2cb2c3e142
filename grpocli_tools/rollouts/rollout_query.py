"""Reading the rollout files of a run by step and condition, for `grpocli rollouts`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.runs.rollouts import read_rollouts
from grpocli.runs.saved_run import SavedRun, check_is_run

STEPS = re.compile(r"(\d*)(:?)(\d*)")
WHERE = re.compile(r"([\w./-]+?)\s*(<=|>=|!=|=|<|>)\s*(.*)")
COLUMNS = "columns."
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}

RolloutRow = dict[str, Any]
PROBLEM_COLUMNS = ("step", "sampled_step", "task", "row", "group", "prompt", "messages")
"""The columns that tell the problem of a completion."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition such as `COLUMN < VALUE`. A missing value satisfies only `!=`.

    `reward/NAME` may be written NAME. `columns.NAME` is a column of the examples, which some tasks may lack.
    """

    column: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        match = WHERE.fullmatch(text.strip())
        if not match:
            signs = " ".join(COMPARISONS)
            raise ConfigError(f"--where {text!r}: write COLUMN<VALUE, such as math<1, with one of {signs}")
        return cls(*match.groups())

    def holds(self, row: RolloutRow) -> bool:
        """Whether a row satisfies the condition. Numbers are compared as numbers, everything else as text.

        Raises ConfigError if there is no such column, or the value is not a number as the column's are.
        """
        value = self._value(row)
        if value is None:
            return self.comparison == "!="
        if isinstance(value, int | float):
            try:
                return COMPARISONS[self.comparison](value, float(self.value))
            except ValueError as error:
                raise ConfigError(f"--where {self.column}: {self.value!r} is not a number") from error
        return COMPARISONS[self.comparison](str(value), self.value)

    def _value(self, row: RolloutRow) -> Any:
        if self.column in row:
            return row[self.column]
        if f"reward/{self.column}" in row:
            return row[f"reward/{self.column}"]
        if self.column.startswith(COLUMNS) and "columns" in row:
            return json.loads(row["columns"]).get(self.column.removeprefix(COLUMNS))
        columns = [column.removeprefix("reward/") for column in row]
        near = nearest(self.column, columns) or f"; there are {', '.join(columns)}"
        raise ConfigError(f"--where {self.column}: there is no such column{near}")


def step_files(run: Path, wanted: str = ":") -> list[Path]:
    """The files of the steps `3`, `10:20` (both included), `:5` or `10:`, in order.

    Raises ConfigError if there are none.
    """
    match = STEPS.fullmatch(wanted.strip())
    if not match or not (wanted.strip()):
        raise ConfigError(f"--step {wanted!r}: write N, or FROM:TO")
    first, colon, last = match.groups()
    low = int(first or 0)
    high = int(last) if last else (None if colon else low)
    if not (run / "rollouts").is_dir():
        check_is_run(run, f"RUN {run}")
        raise ConfigError(f"RUN {run}: the run has sampled nothing yet: there is no folder `rollouts` in it")
    files = SavedRun(run).rollout_files
    chosen = [path for step, path in files.items() if low <= step and (high is None or step <= high)]
    if not chosen:
        have = f"it has the steps {min(files)} to {max(files)}" if files else "it has none yet"
        there = (
            f"--step {wanted}: the run has sampled nothing there; {have}" if files else f"{run}: no rollouts; {have}"
        )
        raise ConfigError(there)
    return chosen


def problem_rows(files: list[Path], conditions: list[Condition]) -> Iterator[RolloutRow]:
    """As `matching_rows`, with the columns that tell the problem of a completion and its rewards."""
    if conditions:
        yield from matching_rows(files, conditions)
        return
    for path in files:
        yield from read_rollouts(path, lambda name: name in PROBLEM_COLUMNS or name.startswith("reward/"))


def matching_rows(files: list[Path], conditions: list[Condition]) -> Iterator[RolloutRow]:
    """The rows that satisfy all conditions, file by file."""
    for path in files:
        for row in read_rollouts(path):
            if all(condition.holds(row) for condition in conditions):
                yield row
