"""Reading the rollout files of a run by step and condition, for `grpocli rollouts`."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, config_errors
from grpocli.runs.saved_run import SavedRun, check_is_run

STEPS = re.compile(r"(\d*)(:?)(\d*)")
WHERE = re.compile(r"([\w./-]+?)\s*(<=|>=|!=|=|<|>)\s*(.*)")
COLUMNS = "columns."
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "!=": operator.ne,
}

RolloutRow = dict[str, Any]


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
        if match := WHERE.fullmatch(text.strip()):
            return cls(*match.groups())
        problem = f"write COLUMN<VALUE, such as math<1, with one of {' '.join(COMPARISONS)}"
        raise ConfigError(problem, key="--where", value=text)

    def holds(self, row: RolloutRow) -> bool:
        """Whether a row satisfies the condition. Numbers are compared as numbers, everything else as text.

        Raises ConfigError if there is no such column, or the value is not a number as the column's are.
        """
        value = self._value(row)
        if value is None:
            return self.comparison == "!="
        compare = COMPARISONS[self.comparison]
        if not isinstance(value, int | float):
            return compare(str(value), self.value)
        with config_errors(ValueError, says="is not a number", key=f"--where {self.column}", value=self.value):
            return compare(value, float(self.value))

    def _value(self, row: RolloutRow) -> Any:
        for name in (self.column, f"reward/{self.column}"):
            if name in row:
                return row[name]
        if self.column.startswith(COLUMNS) and "columns" in row:
            return json.loads(row["columns"]).get(self.column.removeprefix(COLUMNS))
        columns = [column.removeprefix("reward/") for column in row]
        near = nearest(self.column, columns) or f"; there are {', '.join(columns)}"
        raise ConfigError(f"there is no such column{near}", key=f"--where {self.column}")


def steps_of(saved: SavedRun, wanted: str = ":") -> list[int]:
    """The steps `3`, `10:20` (both included), `:5` or `10:` that have a rollout file, in order.

    Raises ConfigError if there are none.
    """
    match = STEPS.fullmatch(wanted.strip())
    if not match or not wanted.strip():
        raise ConfigError("write N, or FROM:TO", key="--step", value=wanted)
    first, colon, last = match.groups()
    low, high = int(first or 0), int(last or (10**9 if colon else first))
    steps = list(saved.rollout_files)
    if not steps:
        check_is_run(saved.path, f"RUN {saved.path}")
        raise ConfigError("the run has sampled nothing yet", key="RUN", value=saved.path)
    chosen = [step for step in steps if low <= step <= high]
    if not chosen:
        problem = f"the run has sampled nothing there; it has the steps {steps[0]} to {steps[-1]}"
        raise ConfigError(problem, key="--step", value=wanted)
    return chosen


def matching_rows(
    saved: SavedRun,
    steps: Iterable[int],
    conditions: Sequence[Condition],
    wanted: Callable[[str], bool] = lambda column: True,
) -> Iterator[RolloutRow]:
    """The rows of these steps that satisfy all conditions. wanted: whether a column is read, without conditions."""
    for step in steps:
        for row in saved.rollouts(step, (lambda column: True) if conditions else wanted):
            if all(condition.holds(row) for condition in conditions):
                yield row
