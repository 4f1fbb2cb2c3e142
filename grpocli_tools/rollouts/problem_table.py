"""`grpocli rollouts RUN --problems`: how often each problem of a run was sampled, and how often it was solved."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.tasks.curriculum import KINDS, load_problems
from grpocli.text import one_line
from grpocli.training.resume_point import latest

if TYPE_CHECKING:
    from rich.console import Console

    from grpocli_tools.rollouts.rollout_query import RolloutRow

SORTS: dict[str, Any] = {
    "row": lambda one: (one.task, -1 if one.row is None else one.row),
    "pass_rate": lambda one: (one.pass_rate is None, one.pass_rate or 0.0, -one.sampled),
    "sampled": lambda one: -one.sampled,
    "last": lambda one: -one.step,
}
"""{--sort: key}: in the order of the data; hardest, most sampled, or last seen first."""
WORDS = 200
"""Characters of a prompt, which the table cuts to the width of the terminal."""


@dataclass(slots=True)
class Problem:
    """A problem of a run. sampled: its completions; scored, right: those that its accuracy reward scored, and of them
    the right ones; last, step: the share of right ones in the last group, and the step that sampled it.
    """

    task: str
    row: int | None
    prompt: str = ""
    sampled: int = 0
    scored: int = 0
    right: int = 0
    last: float | None = None
    step: int = 0
    resting: bool = False

    @property
    def pass_rate(self) -> float | None:
        return self.right / self.scored if self.scored else None

    def add(self, rewards: Sequence[float | None], step: int) -> None:
        """Add a group."""
        scores = [score for score in rewards if score is not None and not math.isnan(score)]
        right = sum(score >= 1 for score in scores)
        self.sampled, self.step = self.sampled + len(rewards), step
        self.scored, self.right = self.scored + len(scores), self.right + right
        self.last = right / len(scores) if scores else self.last

    def as_dict(self) -> dict[str, Any]:
        """The problem as it is exported."""
        return {
            "task": self.task,
            "row": self.row,
            "sampled": self.sampled,
            "pass_rate": self.pass_rate,
            "last_pass_rate": self.last,
            "last_step": self.step,
            "resting": self.resting,
            "prompt": self.prompt,
        }


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of a run's saved config that the table needs; a config that cannot be read has none."""

    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path) -> RunKeys:
        from grpocli.runs.saved_run import SavedRun

        saved = SavedRun(run)
        if not saved.config and saved.dir.config.exists():
            unknown = "which problems rest is unknown, and the first reward counts as the accuracy"
            print(f"warning: {run / 'config.yaml'} cannot be read: {unknown}", file=sys.stderr)
            return cls()
        return cls(saved.config)

    def accuracy_reward(self, task: str, names: Sequence[str]) -> str | None:
        """The accuracy reward of a task: see `accuracy_reward_of`. names: rewards of the rollout file."""
        rewards = self._task(task).get("rewards") or list(self._section("reward")) or names
        preferred = self._section("eval").get("reward")
        return preferred if preferred in rewards else next(iter(rewards), None)

    def no_resampling_pass_rate(self, task: str) -> float | None:
        rate = self._task(task).get("no_resampling_pass_rate")
        return float(rate) if isinstance(rate, int | float) else None

    def _task(self, name: str) -> Mapping[str, Any]:
        task = self._section("task")
        own = task.get(name) if str(task.get("_target_")) == "task/mixture" else task
        return own if isinstance(own, Mapping) else {}

    def _section(self, name: str) -> Mapping[str, Any]:
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}


def problems_of(rows: Iterable[RolloutRow], keys: RunKeys) -> list[Problem]:
    """The problems of rows, which come group by group. Files of earlier versions lack `row`: their prompt counts."""
    found: dict[tuple[str, Any], Problem] = {}
    for (step, _), members in groupby(rows, key=lambda row: (row["step"], row["group"])):
        group = list(members)
        first = group[0]
        if first.get("sampled_step", step) != step:
            continue  # a leftover group, which the file of the step before has, too
        task, number = first.get("task") or "", first.get("row")
        key = (task, first["prompt"] if number is None else number)
        problem = found.get(key) or found.setdefault(key, Problem(task, number, _words(first)))
        names = [name.removeprefix("reward/") for name in first if name.startswith("reward/")]
        name = keys.accuracy_reward(task, names)
        problem.add([row.get(f"reward/{name}") for row in group], step)
    return list(found.values())


def saved_problems(folder: Path) -> list[Problem]:
    """The problems that a checkpoint has scores of, for a run whose rollout files are gone."""
    found = []
    for task, saved in load_problems(folder).items():
        for row, n, right, last, step in zip(*(saved.table[name].tolist() for name in KINDS), strict=True):
            found.append(Problem(task, row, "", n, n, right, last, step))
    return found


def rest(problems: Iterable[Problem], keys: RunKeys, run: Path) -> None:
    """Mark the problems that rest: solved in their last group, and since all of their task's problems were woken."""
    checkpoint = latest(run / "checkpoints")
    try:
        saved = load_problems(checkpoint) if checkpoint else {}
    except (OSError, ValueError):
        saved = {}  # only a wake-up is unknown then
    woke = {task: one.position.woke for task, one in saved.items() if one.position}
    for one in problems:
        least = keys.no_resampling_pass_rate(one.task)
        solved = least is not None and one.last is not None and one.last >= least
        one.resting = solved and one.step > woke.get(one.task, 0)


def show(console: Console, problems: Sequence[Problem], limit: int) -> None:
    """Print the table, and a line with the totals."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    tasks = len({one.task for one in problems}) > 1
    for column in ("task",) if tasks else ():
        table.add_column(column, no_wrap=True)
    for column in ("row", "sampled", "pass rate", "last group", "last step"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis")
    for one in problems[: limit or None]:
        cells = ["-" if one.row is None else str(one.row), f"{one.sampled:,}", _share(one.pass_rate), _share(one.last)]
        cells += [str(one.step), "rests" if one.resting else "", one.prompt]
        table.add_row(*([one_line(one.task)] if tasks else []), *cells)
    console.print(table)
    resting = sum(one.resting for one in problems)
    more = f", the first {limit:,} are shown" if 0 < limit < len(problems) else ""
    console.print(f"{len(problems):,} problems, {resting:,} of them rest{more}", soft_wrap=True)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _words(row: RolloutRow) -> str:
    """The first words of the question: of the last message of the user, or of the plain prompt."""
    asked = [m["content"] for m in row.get("messages") or [] if isinstance(m, dict) and m.get("role") == "user"]
    text = asked[-1] if asked and isinstance(asked[-1], str) else str(row["prompt"])
    return one_line(text[: 4 * WORDS])[:WORDS]
