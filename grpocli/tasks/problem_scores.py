"""The scores of a run's problems: how often each was sampled, how often it was solved, and when it was last seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "problems.safetensors"
"""The scores of all tasks, in a checkpoint."""
KINDS = {"row": np.int64, "completions": np.int64, "right": np.int64, "last": np.float64, "step": np.int64}
"""The columns of `ProblemScores.table` and their types."""

Rows = NDArray[np.int64]


@dataclass(slots=True)
class ProblemScores:
    """The scores of one task's problems, by the number of their row.

    A problem has `completions` scored so far, of which the accuracy reward calls `right` right; `last` is the share of
    right ones in its last group, which was sampled for step `step`.
    """

    _place: dict[int, int] = field(default_factory=dict)
    _table: dict[str, NDArray[Any]] = field(default_factory=lambda: {name: np.empty(0, t) for name, t in KINDS.items()})

    def __len__(self) -> int:
        return len(self._place)

    def add(self, row: int, completions: int, right: int, step: int) -> None:
        """Add a group. One without scored completions says nothing about its problem."""
        if not completions:
            return
        place = self._place.setdefault(row, len(self._place))
        table = self._table
        if place >= len(table["row"]):
            for name, values in table.items():
                table[name] = np.concatenate([values, np.zeros(max(256, len(values)), values.dtype)])
        table["row"][place] = row
        table["completions"][place] += completions
        table["right"][place] += right
        table["last"][place] = right / completions
        table["step"][place] = step

    def pass_rate(self, row: int) -> float | None:
        """The share of right completions of a problem; None before the first."""
        if (place := self._place.get(row)) is None:
            return None
        return float(self._table["right"][place] / self._table["completions"][place])

    def pass_rates(self, rows: Rows, unknown: float) -> NDArray[np.float64]:
        """`pass_rate` of each of these rows; `unknown` for problems without a score."""
        places = self._places(rows)
        found = np.full(len(rows), unknown)
        known = places >= 0
        found[known] = self._table["right"][places[known]] / self._table["completions"][places[known]]
        return found

    def solved(self, rows: Rows, least: float, since: int) -> NDArray[np.bool_]:
        """Which problems had a pass rate of at least `least` in their last group, sampled after step `since`."""
        places = self._places(rows)
        found = np.zeros(len(rows), bool)
        known = places >= 0
        last, step = (self._table[name][places[known]] for name in ("last", "step"))
        found[known] = (last >= least) & (step > since)
        return found

    def _places(self, rows: Rows) -> Rows:
        return np.fromiter((self._place.get(row, -1) for row in rows.tolist()), np.int64, len(rows))

    @property
    def rows(self) -> Rows:
        """The rows of the problems that have a score, in the order of their first one."""
        return self._table["row"][: len(self)]

    @property
    def table(self) -> dict[str, NDArray[Any]]:
        """A copy of all scores: one value for each problem in each column of KINDS."""
        return {name: values[: len(self)].copy() for name, values in self._table.items()}

    @classmethod
    def of(cls, table: Mapping[str, NDArray[Any]]) -> ProblemScores:
        """The scores of a `table`."""
        columns = {name: np.array(table[name], kind) for name, kind in KINDS.items()}
        return cls({row: place for place, row in enumerate(columns["row"].tolist())}, columns)


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """How far a task's order has come.

    epoch: passes over the data before this one. start: the first row of the block that is drawn from; 0 for data that
    is read whole. taken: rows of this block that are drawn. woke: the last step after which all problems rested and
    were woken; 0: none.
    """

    epoch: int = 0
    start: int = 0
    taken: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    woke: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TaskProblems:
    """The saved scores of one task. position: None if its order is a function of the draw's number."""

    table: Mapping[str, NDArray[Any]]
    position: Position | None = None


def save(problems: Mapping[str, TaskProblems], folder: Path) -> None:
    """Write the scores of each task into a checkpoint."""
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {}
    for i, one in enumerate(problems.values()):
        tensors |= {f"{i}.{name}": values for name, values in one.table.items()}
        if at := one.position:
            tensors |= {f"{i}.position": np.array([at.epoch, at.start, at.woke], np.int64), f"{i}.taken": at.taken}
    save_file(tensors, folder / FILE, {"tasks": json.dumps(list(problems))})


def load(folder: Path) -> dict[str, TaskProblems]:
    """The scores of a checkpoint by task; empty for one without scores."""
    from safetensors import safe_open

    if not (folder / FILE).exists():
        return {}
    with safe_open(folder / FILE, "numpy") as file:
        names = json.loads(file.metadata()["tasks"])
        tensors: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {}
    for i, name in enumerate(names):
        position = None
        if f"{i}.position" in tensors:
            epoch, start, woke = tensors[f"{i}.position"].tolist()
            position = Position(epoch, start, tensors[f"{i}.taken"], woke)
        found[name] = TaskProblems({kind: tensors[f"{i}.{kind}"] for kind in KINDS}, position)
    return found
