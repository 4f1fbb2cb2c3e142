"""The data of a page, from the folders of runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpocli.errors import GrpoError
from grpocli.progress import Progress, unreported
from grpocli.runs.run_dir import resume_command
from grpocli.runs.saved_run import SavedRun
from grpocli.text import one_line
from grpocli.version import __version__
from grpocli_tools.report.charts import charts
from grpocli_tools.report.comparison import Label, RunRow, find_runs, labels, page_differences, page_results
from grpocli_tools.report.curves import Curves, thinned, with_evaluations
from grpocli_tools.report.diagnosis import verdict, warnings
from grpocli_tools.report.facts import compute_dtype, facts, sessions, what_changed
from grpocli_tools.report.page_data import PageData, RolloutSelection, RunView
from grpocli_tools.report.rollout_sample import BUDGET, Prompts, RolloutSample, TokenTexts

ROWS = 6_000
"""Rows of metrics of all runs of a page; a run has at most ROWS_OF_RUN, at least FEWEST_ROWS."""
ROWS_OF_RUN, FEWEST_ROWS = 1_000, 60
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
            charts=charts(
                {name for run in runs for name in run.metrics}, {} if self.live else _constants(runs), _copies(runs)
            ),
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
        samples = run.flat.get("eval.samples")
        curves = with_evaluations(raw, run.outcome, samples if isinstance(samples, int) else 1)
        found = warnings(curves, run.flat | {"model.dtype": compute_dtype(run)})
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


def _copies(runs: Sequence[RunView]) -> frozenset[str]:
    """The metric of the only reward, if it is the reward of every run."""
    names = {name for run in runs for name in run.metrics if name.startswith("rewards/") and name.endswith("/mean")}
    same = all(run.metrics.get(name) == run.metrics.get("reward") for run in runs for name in names)
    return frozenset(names) if len(names) == 1 and same else frozenset()


def _constants(runs: Sequence[RunView]) -> dict[str, float]:
    """The metrics with the same value in all steps of all runs."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for name, series in run.metrics.items():
            values.setdefault(name, set()).update(value for value in series if value is not None)
    return {name: min(found) for name, found in values.items() if len(found) == 1}
