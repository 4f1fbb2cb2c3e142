"""`grpocli rollouts RUN --problems`: how often each problem of a run was sampled, and how often it was solved."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from grpocli.runs.saved_run import SavedRun
from grpocli.tasks.curriculum import KINDS, Position, load_problems
from grpocli.text import one_line
from grpocli.training.checkpoint import latest, restoring
from grpocli_tools.rollouts.rollout_query import Condition, RolloutRow, matching_rows, steps_of

if TYPE_CHECKING:
    from rich.console import Console

SORTS: dict[str, Any] = {
    "row": lambda one: (one.task, one.row),
    "pass_rate": lambda one: (one.pass_rate is None, one.pass_rate or 0.0, -one.sampled),
    "sampled": lambda one: -one.sampled,
    "last": lambda one: -one.step,
}
"""{--sort: key}: in the order of the data; hardest, most sampled, or last seen first."""
WORDS = 200
"""Characters of a prompt, which the table cuts to the width of the terminal."""
COLUMNS = ("step", "sampled_step", "task", "row", "group", "prompt", "messages")
"""The columns that tell the problem of a completion."""


@dataclass(slots=True)
class Problem:
    """A problem of a run."""

    task: str
    row: int
    prompt: str = ""
    sampled: int = 0
    """Its completions."""
    scored: int = 0
    """Those that its accuracy reward scored."""
    right: int = 0
    """Of these, the right ones."""
    last: float | None = None
    """The share of right ones in the last group."""
    step: int = 0
    """The step that sampled that group."""
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


def problems_of(saved: SavedRun, wanted: str | None, conditions: Sequence[Condition]) -> list[Problem]:
    """The problems of a run's rollout files, or of its newest checkpoint's scores if the files are gone."""
    checkpoint = latest(saved.path / "checkpoints")
    with restoring(checkpoint):
        scores = load_problems(checkpoint) if checkpoint else {}
    if saved.dir.config.exists() and not saved.config:
        unknown = "which problems rest is unknown, and the first reward counts as the accuracy"
        print(f"warning: {saved.dir.config} cannot be read: {unknown}", file=sys.stderr)
    if scores and not saved.rollout_files and not (conditions or wanted):
        found = [
            Problem(task, row, "", n, n, right, last, step)
            for task, one in scores.items()
            for row, n, right, last, step in zip(*(one[name].tolist() for name in KINDS), strict=True)
        ]
    else:
        steps = steps_of(saved, wanted or ":")
        if gone := sorted(set(range(steps[0], steps[-1])) - set(steps)):
            which = ", ".join(map(str, gone[:4])) + (" ..." if gone[4:] else "")
            print(f"warning: rollout files of steps {which} are gone: their samples are not counted", file=sys.stderr)
        rows = matching_rows(saved, steps, conditions, lambda name: name in COLUMNS or name.startswith("reward/"))
        found = _problems(rows, saved)
    woke = {task: Position.of(one).woke for task, one in scores.items() if "position" in one}
    for problem in found:  # one rests if it is solved in its last group, and since all of its task's were woken
        least = _task(saved, problem.task).get("no_resampling_pass_rate")
        solved = isinstance(least, int | float) and problem.last is not None and problem.last >= least
        problem.resting = solved and problem.step > woke.get(problem.task, 0)
    return found


def _problems(rows: Iterable[RolloutRow], saved: SavedRun) -> list[Problem]:
    """The problems of rows, which come group by group."""
    found: dict[tuple[str, int], Problem] = {}
    for (step, _), members in groupby(rows, key=lambda row: (row["step"], row["group"])):
        group = list(members)
        first = group[0]
        if first["sampled_step"] != step:
            continue  # a leftover group, which the file of the step before has, too
        task = first["task"] or ""
        problem = found.setdefault((task, first["row"]), Problem(task, first["row"], _words(first)))
        names = [name.removeprefix("reward/") for name in first if name.startswith("reward/")]
        name = _accuracy_reward(saved, task, names)
        problem.add([row.get(f"reward/{name}") for row in group], step)
    return list(found.values())


def _accuracy_reward(saved: SavedRun, task: str, names: Sequence[str]) -> str | None:
    """The accuracy reward of a task: see `accuracy_reward_of`. names: rewards of the rollout file."""
    rewards = _task(saved, task).get("rewards") or list(saved.section("reward")) or names
    preferred = saved.section("eval").get("reward")
    return preferred if preferred in rewards else next(iter(rewards), None)


def _task(saved: SavedRun, name: str) -> Mapping[str, Any]:
    """The section of a task in the run's config."""
    task = saved.section("task")
    own = task.get(name) if task.get("_target_") == "task/mixture" else task
    return own if isinstance(own, Mapping) else {}


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
        cells = [str(one.row), f"{one.sampled:,}", _share(one.pass_rate), _share(one.last), str(one.step)]
        table.add_row(*([one_line(one.task)] if tasks else []), *cells, "rests" if one.resting else "", one.prompt)
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
