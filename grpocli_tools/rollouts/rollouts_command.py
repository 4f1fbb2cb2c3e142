"""`grpocli rollouts`: show, filter and export the completions of a run."""

from __future__ import annotations

import json
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError, RunError, config_errors
from grpocli.runs.saved_run import SavedRun, check_is_run
from grpocli.text import clean, one_line, prompt_text
from grpocli.types import Status
from grpocli_tools.console import paged
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from rich.console import Console

WRITERS = {".jsonl": "to_json", ".parquet": "to_parquet"}
"""The method of a table that exports it, by the file's suffix."""
SHOWN = 2000
"""Characters shown of a prompt or completion without --whole."""


def main(argv: Sequence[str]) -> int:
    parser = parser_of("rollouts", __doc__)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; columns are filtered with --where COLUMN=VALUE")
    if args.export:
        _check_target(args.export)
    from grpocli.runs.saved_run import SavedRun

    saved = SavedRun(args.run)
    conditions = [Condition.parse(text) for text in args.where]
    conditions += [Condition("finish_reason", "=", args.finish)] if args.finish else []
    conditions += [Condition("task", "=", args.task)] if args.task else []
    if args.problems:
        problems = problems_of(saved, args.step, conditions)
        problems.sort(key=SORTS[args.sort])
        if problems and not args.export:
            with paged() as console:
                show_problems(console, problems, args.n)
            return 0
        return _export([one.as_dict() for one in problems[: args.n or None]], None, args.export, "problems")
    steps = steps_of(saved, args.step or ":")[0 if args.step else -1 :]
    rows = islice(matching_rows(saved, steps, conditions), args.n or None)
    if args.export:
        from pyarrow import unify_schemas

        from grpocli.runs.rollouts import read_schema

        files = [saved.rollout_files[step] for step in steps]
        schema = unify_schemas([read_schema(path) for path in files])  # a resume may have changed the rewards
        return _export(list(rows), schema, args.export, "completions")
    first = list(islice(rows, 1))
    if not first:
        return _nothing()
    with paged() as console:
        for row in chain(first, rows):
            _show(console, row, args.whole)
    return 0


def _nothing() -> int:
    print("no completion matches", file=sys.stderr)
    return 1


def _show(console: Console, row: RolloutRow, whole: bool) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(clean(text), style=style, soft_wrap=True)

    say(f"── {_title(row)}".replace("\n", " "), "dim")
    say(_cut(row["prompt"], whole), "dim")
    said = row.get("episode")
    say(_cut(prompt_text(said) if said and len(said) > 1 else row["completion"], whole))
    if row.get("answer") is not None:
        say(f"reference: {_cut(row['answer'], whole)}", "cyan")


def _title(row: RolloutRow) -> str:
    """The origin of a completion, its scores, and its status unless it was trained on."""
    rewards = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    status = row.get("status", Status.TRAINED)
    parts = [
        f"step {row['step']}  group {row['group']}",
        f"task {row['task']}" if row.get("task") else "",
        *(f"{name} {'-' if value is None else f'{value:g}'}" for name, value in rewards.items()),
        "" if row["advantage"] is None else f"advantage {row['advantage']:.3f}",
        f"{len(row['completion_ids'])} tokens, {row['finish_reason']}",
        "" if status == Status.TRAINED else status,
    ]
    return "  ".join(part for part in parts if part)


def _cut(text: str, whole: bool) -> str:
    more = len(text) - SHOWN
    return text if whole or more <= 0 else f"{text[:SHOWN]} ... ({more:,} more characters: --whole)"


def _export(rows: list[RolloutRow], schema: Any, target: str, what: str) -> int:
    """Write rows to a file, or to a private data set on the hub. Returns the exit code."""
    if not rows:
        return _nothing()
    from datasets import Dataset
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # of the client it has chosen
    from pyarrow import Table

    table, path = Dataset(Table.from_pylist(rows, schema=schema)), Path(target)
    beside = path.with_name(f".tmp-{path.name}")
    try:
        if target.startswith("hub:"):
            table.push_to_hub(target.removeprefix("hub:"), private=True)
        else:
            getattr(table, WRITERS[path.suffix])(str(beside))
            beside.replace(path)
    except (OSError, ValueError, HTTPError) as error:
        raise RunError(f"--export={target}: {one_line(str(error))[:300]}") from error
    finally:
        beside.unlink(missing_ok=True)
    print(clean(f"{len(rows):,} {what} in {target}"))
    return 0


def _check_target(target: str) -> None:
    path = Path(target)
    if target.startswith("hub:"):
        return
    if path.suffix not in WRITERS:
        raise ConfigError(f"must end in {' or '.join(WRITERS)}, or be hub:OWNER/NAME", key="--export", value=path)
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", key="--export", value=path)


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


SORTS: dict[str, Any] = {
    "row": lambda one: (one.task, one.row),
    "pass_rate": lambda one: (one.pass_rate is None, one.pass_rate or 0.0, -one.sampled),
    "sampled": lambda one: -one.sampled,
    "last": lambda one: -one.step,
}
"""{--sort: key}: in the order of the data; hardest, most sampled, or last seen first."""
WORDS = 200
"""Characters of a prompt, which the table cuts to the width of the terminal."""
PROBLEM_COLUMNS = ("step", "sampled_step", "task", "row", "group", "prompt", "messages")
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

    @property
    def pass_rate(self) -> float | None:
        return self.right / self.scored if self.scored else None

    def add(self, rewards: Sequence[float | None], step: int) -> None:
        scores = [score for score in rewards if score is not None and not math.isnan(score)]
        right = sum(score >= 1 for score in scores)
        self.sampled, self.step = self.sampled + len(rewards), step
        self.scored, self.right = self.scored + len(scores), self.right + right
        self.last = right / len(scores) if scores else self.last

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "row": self.row,
            "sampled": self.sampled,
            "pass_rate": self.pass_rate,
            "last_pass_rate": self.last,
            "last_step": self.step,
            "prompt": self.prompt,
        }


def problems_of(saved: SavedRun, wanted: str | None, conditions: Sequence[Condition]) -> list[Problem]:
    """The problems of a run's rollout files."""
    if saved.dir.config.exists() and not saved.config:
        print(f"warning: {saved.dir.config} cannot be read: the first reward counts as the accuracy", file=sys.stderr)
    steps = steps_of(saved, wanted or ":")
    if gone := sorted(set(range(steps[0], steps[-1])) - set(steps)):
        which = ", ".join(map(str, gone[:4])) + (" ..." if gone[4:] else "")
        print(f"warning: rollout files of steps {which} are gone: their samples are not counted", file=sys.stderr)
    rows = matching_rows(saved, steps, conditions, lambda name: name in PROBLEM_COLUMNS or name.startswith("reward/"))
    return _problems(rows, saved)


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


def show_problems(console: Console, problems: Sequence[Problem], limit: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    tasks = len({one.task for one in problems}) > 1
    for column in ("task",) if tasks else ():
        table.add_column(column, no_wrap=True)
    for column in ("row", "sampled", "pass rate", "last group", "last step"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis")
    for one in problems[: limit or None]:
        cells = [str(one.row), f"{one.sampled:,}", _share(one.pass_rate), _share(one.last), str(one.step)]
        table.add_row(*([one_line(one.task)] if tasks else []), *cells, one.prompt)
    console.print(table)
    more = f", the first {limit:,} are shown" if 0 < limit < len(problems) else ""
    console.print(f"{len(problems):,} problems{more}", soft_wrap=True)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _words(row: RolloutRow) -> str:
    """The first words of the question: of the last message of the user, or of the plain prompt."""
    asked = [m["content"] for m in row.get("messages") or [] if isinstance(m, dict) and m.get("role") == "user"]
    text = asked[-1] if asked and isinstance(asked[-1], str) else str(row["prompt"])
    return one_line(text[: 4 * WORDS])[:WORDS]
