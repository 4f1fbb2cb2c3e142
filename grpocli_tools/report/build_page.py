"""The data of a page, from the folders of runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError, GrpoError
from grpocli.progress import Progress, unreported
from grpocli.runs.metrics import read_summary
from grpocli.runs.run_dir import RunDir, resume_command
from grpocli.runs.saved_run import SavedRun, ended_by_callback, ended_early, flatten
from grpocli.text import one_line
from grpocli.version import __version__
from grpocli_tools.report.charts import charts
from grpocli_tools.report.curves import Curves, current_summary, curves_of, read_curves, thinned, with_evaluations
from grpocli_tools.report.diagnosis import verdict, warnings
from grpocli_tools.report.facts import compute_dtype, facts, session_starts, sessions, what_changed
from grpocli_tools.report.page_data import PageData, RolloutSelection, RunView, Series
from grpocli_tools.report.rollout_sample import BUDGET, Prompts, RolloutSample
from grpocli_tools.report.run_rows import RunRow, find_runs
from grpocli_tools.report.several import differences, labels, natural, results
from grpocli_tools.report.token_texts import TokenTexts

ROWS = 6_000
"""Rows of metrics of all runs of a page; a run has at most ROWS_OF_RUN, at least FEWEST_ROWS."""
ROWS_OF_RUN, FEWEST_ROWS = 1_000, 60

KINDS = ("done", "stopped", "failed")
"""The values of `exit_kind` in a summary."""
LONGEST_CAUSE = 2_000
"""Characters shown of the error that ended a run."""

FORMULA_KEYS = ("algorithm", "reward", "rollout", "train", "optim")
"""The sections of a config that the formula of its objective shows."""

FormulaOf = Callable[[Path], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds the data of a page.

    formula: the lines of a run's objective; raises GrpoError if it is unknown. completions: at most, for all runs; None
    for as many as fit into the budget. formulas: those known, by the sections that they show. live: leave completions
    out, because the page asks for those of a step.
    """

    formula: FormulaOf
    completions: int | None = None
    progress: Progress = unreported
    formulas: dict[str, list[str]] = field(default_factory=dict)
    live: bool = False

    def page(self, folders: Sequence[Path]) -> PageData:
        """The page of the runs below some folders. Raises ConfigError if there are none."""
        rows, notes = _rows(folders), list[str]()
        if not rows:
            where = ", ".join(map(str, folders))
            raise ConfigError(f"there is no run below {where}; give the folder of a run or sweep")
        prompts = Prompts()
        runs = self._runs(rows, prompts, notes)
        several = len(runs) > 1
        return PageData(
            title=_title(folders, runs),
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=__version__,
            charts=charts(
                {name for run in runs for name in run.metrics}, {} if self.live else _constants(runs), _copies(runs)
            ),
            runs=runs,
            prompts=prompts.found,
            results=results(rows, runs) if several else None,
            differences=differences(rows, runs) if several else None,
            notes=notes,
        )

    def _runs(self, rows: Sequence[RunRow], prompts: Prompts, notes: list[str]) -> list[RunView]:
        """The runs in order, with as many steps as the page has room for."""
        names, groups = labels(rows), dict[str, list[int]]()
        for place, (_, _, group) in enumerate(names):
            groups.setdefault(group, []).append(place)
        most = max(FEWEST_ROWS, min(ROWS_OF_RUN, ROWS // len(rows)))
        found: dict[int, RunView] = {}
        for places in groups.values():
            views = [self._run(i, rows[i], len(rows), names[i], prompts, notes) for i in places]
            found |= zip(places, _with_fewer_steps(views, most), strict=True)
        return [found[place] for place in range(len(rows))]

    def _run(
        self, place: int, row: RunRow, runs: int, names: tuple[str, str, str], prompts: Prompts, notes: list[str]
    ) -> RunView:
        """A run, the `place`-th of `runs`. names: its name, label and group. notes: gets a note for each problem."""
        problems: list[str] = []
        config = _config(row.path, problems)
        flat = flatten(config)
        raw, summary = _recorded(row.path, problems)
        raw = replace(raw, changed=what_changed(row.path, config, flat))
        curves = with_evaluations(raw, summary, _samples(flat))
        flat |= {"model.dtype": compute_dtype(row.path, flat)}
        found = warnings(curves, flat)
        steps = _int(flat.get("train.steps"))
        early = ended_early(summary, flat.get("eval.stop_at.metric"), flat.get("eval.stop_at.threshold"))
        early = early or ended_by_callback(summary)
        state = state_of(row.path, summary, steps, early)
        view = RunView(
            id=f"r{place}",
            name=names[0],
            path=str(row.path),
            label=names[1],
            group=names[2],
            state=state,
            total_steps=steps,
            verdict=verdict(curves, state, found),
            facts=facts(row.path, config, flat, summary, raw),
            formula=self._formula(row.path, config, problems),
            overrides=[str(text) for text in config.get("overrides") or []],
            sessions=sessions(row.path),
            starts=session_starts(row.path),
            notice=_notice(row.path, state, curves.steps[-1] if curves.steps else 0, steps, summary, early),
            resume="" if state in ("running", "done") else resume_command(row.path),
            warnings=found,
            steps=curves.steps,
            metrics=curves.metrics,
            rollouts=self._rollouts(row.path, config, runs, prompts, problems),
        )
        notes += [f"{names[0]}: {problem}" for problem in problems]
        return view

    def _rollouts(
        self, run: Path, config: Mapping[str, Any], runs: int, prompts: Prompts, problems: list[str]
    ) -> RolloutSelection:
        """A run's share of the completions of a page with `runs` runs; only their steps on a live page."""
        share = None if self.completions is None else self.completions // runs
        tokens = None if self.live else TokenTexts.of_run(run, config)
        sample = RolloutSample(run, prompts, tokens, BUDGET // runs, share, problems, self.progress)
        return RolloutSelection(steps=sorted(sample.files)) if self.live else sample.read()

    def _formula(self, run: Path, config: Mapping[str, Any], problems: list[str]) -> list[str]:
        """The formula, composed once for runs whose configs differ in nothing that it shows."""
        if not config:
            return []  # another note says why
        key = json.dumps([config.get(name) for name in FORMULA_KEYS], default=str)
        if key not in self.formulas:
            try:
                self.formulas[key] = list(self.formula(run))
            except GrpoError as error:
                problems.append(f"the formula of the objective is unknown: {error}")
                return []
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                problems.append("the formula of the objective is unknown: config.yaml is not the config of a run")
                return []
        return self.formulas[key]


def _with_fewer_steps(group: Sequence[RunView], most: int) -> list[RunView]:
    """The runs of one group of seeds, with about `most` steps."""
    warned = [warning.step for run in group for warning in run.warnings]
    drawn, rule = thinned([Curves(run.steps, run.metrics) for run in group], most, warned)
    return [
        replace(run, steps=one.steps, metrics=one.metrics, thinning=rule) for run, one in zip(group, drawn, strict=True)
    ]


def _rows(folders: Sequence[Path]) -> list[RunRow]:
    """The runs below some folders, each once."""
    found: dict[Path, RunRow] = {}
    for folder in folders:
        for row in sorted(find_runs(folder), key=lambda row: natural(row.path)):
            found.setdefault(row.path.resolve(), row)
    return list(found.values())


def new_values(run: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, Series]]:
    """The steps and values of new rows of a run's metrics, in order, with the intervals of accuracies."""
    curves = curves_of(rows)
    if any(name.startswith("eval") for name in curves.metrics):
        curves = with_evaluations(curves, {}, _samples(flatten(_config(run, []))))
    return curves.steps, curves.metrics


def _title(folders: Sequence[Path], runs: Sequence[RunView]) -> str:
    names = ", ".join(folder.resolve().name for folder in folders)
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs in {names}"


def _config(run: Path, problems: list[str]) -> dict[str, Any]:
    saved = SavedRun(run, problems)
    return saved.config | {"overrides": saved.overrides} if saved.config else {}


def _recorded(run: Path, problems: list[str]) -> tuple[Curves, dict[str, Any]]:
    """The metrics and the summary of a run; of a summary of an earlier session only the evaluation before training."""
    curves = read_curves(run)
    problems += curves.notes
    summary, note = current_summary(_summary(run, problems), curves)
    problems += [note] if note else []
    return curves, summary


def _summary(run: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_summary(RunDir(run).summary)
    except (ValueError, OSError):
        problems.append("summary.json is broken")
        return {}


def state_of(run: Path, summary: Mapping[str, Any], steps: int, early: str = "") -> str:
    """The state of a run that was asked for some steps, by its lock and the `exit` of its summary.

    early: why it is finished before these steps; empty if it is not.
    """
    if RunDir(run).is_running():
        return "running"
    cause, kind = summary.get("exit"), summary.get("exit_kind")
    if cause is None or (cause == "done" and not early and _int(summary.get("steps")) < steps):
        return "unfinished"  # killed: the first time, or after a resume that asked for more steps
    if kind in KINDS:
        return str(kind)
    return "done" if cause == "done" else "failed"


def _notice(run: Path, state: str, done: int, asked: int, summary: Mapping[str, Any], early: str = "") -> str:
    """Why a run ended early, or that it has more steps than it was asked for."""
    if state == "done" and early and done < asked:
        return f"The run ended as asked after step {done:,} of {asked:,}: {early}."
    if state == "running" or (state == "done" and not 0 < asked < done):
        return ""
    if state == "done":
        return f"The run has {done:,} steps, more than train.steps={asked}."
    steps = f"after step {done:,}" + (f" of {asked:,}" if asked >= done else "")
    saved = RunDir(run).saved_steps()
    newest = f"The newest checkpoint is of step {saved[-1]:,}." if saved else "Without a checkpoint it starts again."
    if state == "unfinished":
        return f"The run was killed {steps}: it has written no summary. {newest}"
    why = one_line(str(summary.get("exit"))[:LONGEST_CAUSE])
    for end in ("; resume with: ", "; when the service is back, "):
        why = why.partition(end)[0]
    return f"The run {'was stopped' if state == 'stopped' else 'failed'} {steps}: {why.rstrip('.')}. {newest}"


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


def _samples(flat: Mapping[str, Any]) -> int:
    return max(1, _int(flat.get("eval.samples")))


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
