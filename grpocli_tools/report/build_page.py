"""The data of a page, from the folders of runs."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.errors import GrpoError
from grpocli.progress import Progress, unreported
from grpocli.runs.metrics import number
from grpocli.runs.run_dir import resume_command
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import accuracy_rewards, format_value, incomparable_since
from grpocli.text import format_duration, one_line
from grpocli.types import DTYPES
from grpocli.version import __version__
from grpocli_tools.report.comparison import Label, RunRow, find_runs, labels, page_differences, page_results
from grpocli_tools.report.diagnosis import verdict, warnings
from grpocli_tools.report.page_data import (
    HIGH,
    LOW,
    Chart,
    ChartLine,
    Curves,
    PageData,
    RolloutSelection,
    RunView,
    thinned,
    with_evaluations,
    with_intervals,
)
from grpocli_tools.report.rollout_sample import BUDGET, Prompts, RolloutSample, TokenTexts

ROWS = 6_000
"""Rows of metrics of all runs of a page; a run has at most ROWS_OF_RUN, at least FEWEST_ROWS."""
ROWS_OF_RUN, FEWEST_ROWS = 1_000, 60
OTHER = "Other metrics"
"""The section of metrics in no chart of `page/charts.yaml`."""
LONGEST_CAUSE = 2_000
"""Characters shown of the error that ended a run."""
FORMULA_KEYS = ("algorithm", "reward", "rollout", "train", "optim")
"""The sections of a config that the formula of its objective shows."""


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds the data of a page."""

    formula: Callable[[SavedRun], Sequence[str]]
    """The lines of a run's objective; raises GrpoError if it is unknown."""
    completions: int | None = None
    """At most, for all runs; None for as many as fit into the budget."""
    progress: Progress = unreported
    formulas: dict[str, list[str]] = field(default_factory=dict)
    """Those known, by the sections that they show."""
    live: bool = False
    """Leave completions out, because the page asks for those of a step, and have every step."""

    def page(self, folders: Sequence[Path]) -> PageData:
        """The page of the runs below some folders. Raises ConfigError if there are none."""
        rows, notes, prompts = find_runs(folders), list[str](), Prompts()
        known = labels(rows)
        runs = [self._run(i, row, len(rows), known[i], prompts, notes) for i, row in enumerate(rows)]
        if not self.live:
            runs = _with_fewer_steps(runs)
        several = len(runs) > 1
        names = ", ".join(folder.resolve().name for folder in folders)
        return PageData(
            title=f"{len(runs)} runs in {names}" if several else runs[0].name,
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=__version__,
            charts=charts({name for run in runs for name in run.metrics}),
            runs=runs,
            prompts=prompts.found,
            results=page_results(rows, known) if several else None,
            differences=page_differences(rows, known) if several else None,
            notes=notes,
        )

    def _run(self, place: int, row: RunRow, runs: int, names: Label, prompts: Prompts, notes: list[str]) -> RunView:
        """A run, the `place`-th of `runs`. notes: gets a note for each problem."""
        run = row.run
        raw = replace(Curves.of(run.metrics), changed=what_changed(run))
        curves = with_intervals(with_evaluations(raw, run.outcome))
        found = warnings(curves, run.flat)
        state, asked = run.state, run.flat.get("train.steps")
        steps = asked if isinstance(asked, int) else 0
        problems: list[str] = []
        view = RunView(
            id=f"r{place}",
            name=names.name,
            path=str(run.path),
            label=names.label,
            group=names.group,
            state=state,
            total_steps=steps,
            verdict=verdict(curves, state, found),
            facts=facts(run, raw),
            formula=self._formula(run, problems),
            overrides=run.overrides,
            sessions=sessions(run),
            starts=[session.step for session in run.sessions[1:]],
            notice=_notice(run, state, curves.last, steps),
            resume="" if state in ("running", "done") else resume_command(run.path),
            warnings=found,
            steps=curves.steps,
            metrics=curves.metrics,
            rollouts=self._rollouts(run, runs, prompts, problems),
        )
        notes += [f"{names.name}: {problem}" for problem in dict.fromkeys([*run.problems, *problems])]
        return view

    def _rollouts(self, run: SavedRun, runs: int, prompts: Prompts, problems: list[str]) -> RolloutSelection:
        """A run's share of the completions of a page with `runs` runs; only their steps on a live page."""
        if self.live:
            return RolloutSelection(steps=list(run.rollout_files))
        share = None if self.completions is None else self.completions // runs
        return RolloutSample(
            run, prompts, TokenTexts.of_run(run), BUDGET // runs, share, problems, self.progress
        ).read()

    def _formula(self, run: SavedRun, problems: list[str]) -> list[str]:
        """The formula, composed once for runs whose configs differ in nothing that it shows."""
        if not run.config:
            return []  # another note says why
        key = json.dumps([run.config.get(name) for name in FORMULA_KEYS], default=str)
        if key not in self.formulas:
            try:
                self.formulas[key] = list(self.formula(run))
            except GrpoError as error:
                problems.append(f"the formula of the objective is unknown: {error}")
                return []
        return self.formulas[key]


def _with_fewer_steps(runs: Sequence[RunView]) -> list[RunView]:
    """The runs with as many steps as the page has room for, the same ones in each group of seeds."""
    most = max(FEWEST_ROWS, min(ROWS_OF_RUN, ROWS // len(runs)))
    found: dict[str, RunView] = {}
    for name in dict.fromkeys(run.group for run in runs):
        group = [run for run in runs if run.group == name]
        warned = [warning.step for run in group for warning in run.warnings]
        drawn, rule = thinned([Curves(run.steps, run.metrics) for run in group], most, warned)
        for run, one in zip(group, drawn, strict=True):
            found[run.id] = replace(run, steps=one.steps, metrics=one.metrics, thinning=rule)
    return [found[run.id] for run in runs]


def _notice(run: SavedRun, state: str, done: int, asked: int) -> str:
    """Why a run ended early, or that it has more steps than it was asked for."""
    early = run.ended_early
    if state == "done" and early and done < asked:
        return f"The run ended as asked after step {done:,} of {asked:,}: {early}."
    if state == "running" or (state == "done" and not 0 < asked < done):
        return ""
    if state == "done":
        return f"The run has {done:,} steps, more than train.steps={asked}."
    steps = f"after step {done:,}" + (f" of {asked:,}" if asked >= done else "")
    saved = run.dir.saved_steps()
    newest = f"The newest checkpoint is of step {saved[-1]:,}." if saved else "Without a checkpoint it starts again."
    if state == "unfinished":
        return f"The run was killed {steps}: it has written no summary. {newest}"
    why = one_line(str(run.outcome.get("exit_cause", run.outcome.get("exit")))[:LONGEST_CAUSE]).rstrip(".")
    return f"The run {'was stopped' if state == 'stopped' else 'failed'} {steps}: {why}. {newest}"


@cache
def specs() -> dict[str, list[dict[str, Any]]]:
    text = files("grpocli_tools.report").joinpath("page", "charts.yaml").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = yaml_text.load(text)
    return found


def charts(metrics: Iterable[str]) -> list[Chart]:
    """The charts that have data, then one for each metric in none of them, so that every metric can be seen."""
    names = {name for name in metrics if not name.endswith((LOW, HIGH))}
    limits = set(metrics) - names
    used: set[str] = set()
    found = []
    for section, spec in ((section, spec) for section, charts in specs().items() for spec in charts):
        if lines := [
            line for pattern, label in spec["lines"].items() for line in _lines(pattern, label, names, limits)
        ]:
            used |= {line.metric for line in lines}
            found.append(Chart(section=section, **{**spec, "lines": lines}))
    rest = [Chart(f"other_{i}", name, OTHER, [ChartLine(name, name)]) for i, name in enumerate(sorted(names - used))]
    return [*found, *rest]


def _lines(pattern: str, label: str, names: set[str], limits: set[str]) -> list[ChartLine]:
    regex = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)"))
    matches = [(name, match) for name in sorted(names) if (match := regex.fullmatch(name))]
    return [
        ChartLine(
            name,
            label.replace("*", match[1]) if match.groups() else label,
            *(name + end if name + end in limits else "" for end in (LOW, HIGH)),
        )
        for name, match in matches
    ]


FROM_DATA = ("hub", "jsonl")
"""Tasks that only their data distinguish."""
UNEQUAL_STEPS = (("order", "difficulty"), ("order", "file"))
"""Keys of a task, with their values, that give some steps easier problems than others."""
KEYS = {
    "sampling": (
        *("rollout.prompts_per_step", "rollout.group_size", "rollout.temperature", "rollout.top_p"),
        *("rollout.max_prompt_tokens", "rollout.max_completion_tokens", "rollout.max_staleness"),
    ),
    "update": ("optim.lr", "optim.schedule", "optim.max_grad_norm", "train.epochs", "train.minibatches"),
    "evaluation": (*("eval.problems", "eval.samples", "eval.every", "eval.stop_at.metric", "eval.stop_at.threshold"),),
    "hardware": ("hardware.device", "hardware.processes", "hardware.train_nodes", "hardware.parallel"),
}
"""The rows that are values of keys."""


def facts(run: SavedRun, curves: Curves) -> list[tuple[str, str]]:
    """(label, value) rows; those that the config does not determine are left out."""
    choices, flat, starts = run.choices, run.flat, [session.step for session in run.sessions[1:]]
    seconds = number(run.outcome.get("seconds")) or math.fsum(value for _, value in curves.series("time/step"))
    tokens = curves.series("num_tokens")
    rows = [
        ("model", _model(choices, flat)),
        ("task", _task(choices, run.section("task"))),
        ("rewards", _rewards(run.section("reward"))),
        ("algorithm", _algorithm(run)),
        ("recipe", choices.get("recipe", "")),
        *((label, _values(flat, keys)) for label, keys in KEYS.items()),
        ("engine", choices.get("engine", "")),
        ("optimizer", choices.get("optim", "")),
        ("seed", format_value(flat["seed"]) if "seed" in flat else ""),
        ("steps", f"{curves.last:,} of {flat.get('train.steps', 'unknown')}"),
        ("time", format_duration(float(seconds))),
        ("tokens", f"{tokens[-1][1]:,}" if tokens else ""),
        ("sessions", f"{len(starts) + 1}, resumed after step {', '.join(map(str, starts))}" if starts else ""),
    ]
    return [(label, value) for label, value in rows if value]


def sessions(run: SavedRun) -> list[tuple[str, str, str]]:
    """(steps before, start, versions and changes) of each session."""
    found = []
    for one in run.sessions:
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        changes = [f"{key} {format_value(old)} → {format_value(new)}" for key, (old, new) in one.changes.items()]
        text = "; ".join([versions, *changes, *map(str, one.fallback)])
        found.append((f"from step {one.step + 1}", str(one.time), text))
    return found


def what_changed(run: SavedRun) -> dict[str, tuple[int, str]]:
    """`Curves.changed` of a run. Rewards of steps that draw easier or harder problems are never comparable."""
    task = {key: value for key, value in run.flat.items() if key.startswith("task.")}
    keys = [key for key, value in task.items() if (key.rpartition(".")[2], value) in UNEQUAL_STEPS]
    reward = incomparable_since(run.sessions, None)
    if keys:
        reward = sys.maxsize, f"{keys[0]}={format_value(task[keys[0]])} gives them easier or harder problems"
    return {"eval": incomparable_since(run.sessions, accuracy_rewards(run.config)), "reward": reward}


def _values(flat: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`prompts_per_step 32, group_size 8`; null is left out."""
    known = {key.rpartition(".")[2]: flat[key] for key in keys if flat.get(key) is not None}
    return ", ".join(f"{name} {format_value(value)}" for name, value in known.items())


def _model(choices: Mapping[str, str], flat: Mapping[str, Any]) -> str:
    name, path = choices.get("model", "unknown"), flat.get("model.path")
    shown = name if not isinstance(path, str) or path == name else path if name == "hf" else f"{name} ({path})"
    dtype, rank = flat.get("model.dtype"), flat.get("model.lora.rank")
    return ", ".join(
        [shown, *([f"LoRA of rank {rank}"] if rank else []), *([f"in {dtype}"] if dtype in DTYPES else [])]
    )


def _task(choices: Mapping[str, str], task: Mapping[str, Any]) -> str:
    """The task, or those of a mixture."""
    if task.get("_target_") == "task/mixture":
        return ", ".join(name for name, part in task.items() if isinstance(part, Mapping))
    name = choices.get("task", "unknown")
    return f"{name} ({task.get('path')})" if name in FROM_DATA else name


def _rewards(rewards: Mapping[str, Any]) -> str:
    weights = {name: part.get("weight", 1) if isinstance(part, Mapping) else 1 for name, part in rewards.items()}
    return ", ".join(f"{name} × {format_value(w)}" if w != 1 else name for name, w in weights.items()) or "none"


def _algorithm(run: SavedRun) -> str:
    """The name with the typed keys of the algorithm, which differ from its defaults."""
    typed = [text.lstrip("+") for text in run.overrides]
    changes = [text[len("algorithm.") :] for text in typed if text.startswith(("algorithm.", "algorithm/"))]
    return run.choices.get("algorithm", "unknown") + (f" with {', '.join(changes)}" if changes else "")
