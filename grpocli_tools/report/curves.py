"""The curves of a run: metrics.jsonl as one series per metric, held-out accuracies with intervals, and thinning."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from grpocli.runs.metrics import number
from grpocli.runs.run_dir import RunDir
from grpocli_tools.evaluation.significance import Paired
from grpocli_tools.report.page_data import MaybeNumber, Series

ACCURACIES = ("accuracy", "accuracy_greedy")
PAIRED = {"eval/accuracy": "eval/accuracy_by_problem", "eval/loss": "eval/loss_by_problem"}
"""Metrics that are compared problem by problem, with the names of their values."""
LOW, HIGH = " (low)", " (high)"
"""The ends of the names of an interval's limits, which are not in metrics.jsonl."""

FEWEST_TO_SMOOTH = 20

WATCHED = (
    ("reward", max),
    ("reward", min),
    ("grad_norm", max),
    ("completions/mean_length", max),
    ("entropy", min),
    ("token_mult_prob_error", max),
)
"""The extremes whose rows thinning keeps in each range of steps."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The metrics of a run.

    steps: in order.
    metrics: a number or None for each step.
    not_finite: the steps at which a metric was recorded as null or NaN.
    notes: a sentence for each problem of the file.
    by_problem: {metric of PAIRED: {step: {problem: value}}}.
    changed: {"eval" or "reward": the step after which values can be compared, and why earlier ones cannot}.
    """

    steps: list[int] = field(default_factory=list)
    metrics: dict[str, Series] = field(default_factory=dict)
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    by_problem: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    changed: dict[str, tuple[int, str]] = field(default_factory=dict)

    def comparable(self, metric: str) -> tuple[list[tuple[int, float]], str]:
        """`series` since a resume last changed what it measures; what was changed, or ""."""
        since, why = self.changed.get("eval" if metric.startswith("eval/") else "reward", (-1, ""))
        return [(step, value) for step, value in self.series(metric) if step > since], why

    def paired(self, metric: str, first: int, last: int) -> Paired | None:
        """The paired test of a metric at two steps; None if a step has no values by problem."""
        values = self.by_problem.get(metric, {})
        return Paired.of(values[first], values[last]) if first in values and last in values else None

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of the steps that have the metric."""
        values = self.metrics.get(metric, [])
        return [(step, value) for step, value in zip(self.steps, values, strict=bool(values)) if value is not None]

    def rows(self, kept: Iterable[int]) -> Curves:
        """Only the rows with these numbers (not steps)."""
        numbers = sorted(kept)
        metrics = {name: [values[i] for i in numbers] for name, values in self.metrics.items()}
        return replace(self, steps=[self.steps[i] for i in numbers], metrics=metrics)


def read_curves(run: Path) -> Curves:
    """The metrics of a run as they are in metrics.jsonl. Broken lines are left out, with a note.

    If a step has two lines, the later one counts.
    """
    path = RunDir(run).metrics
    try:
        lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    except OSError as error:
        return Curves(notes=[f"metrics.jsonl cannot be read: {error.strerror}"])
    rows, broken = [], []
    for line, text in enumerate(lines, start=1):
        if (row := metrics_row(text)) is not None:
            rows.append(row)
        elif text.strip():
            broken.append(line)
    return curves_of(rows, _notes(broken, len(lines)))


def current_summary(summary: Mapping[str, Any], curves: Curves) -> tuple[dict[str, Any], str]:
    """What a summary says about the curves, and a note: of an earlier session only the evaluation before training."""
    last = curves.steps[-1] if curves.steps else 0
    if not summary or summary.get("steps") == last:
        return dict(summary), ""
    note = f"summary.json is of an earlier session, which ended at step {summary.get('steps')}"
    return {name: value for name, value in summary.items() if name.endswith("_before")}, note


def smoothed(series: Sequence[tuple[int, float]], weight: float) -> list[tuple[int, float]]:
    """An exponential moving average of (step, value), corrected for its start as in Adam.

    Fewer than FEWEST_TO_SMOOTH values, such as evaluations, stay as they are. `page/series.js` has the same rules.
    """
    if len(series) < FEWEST_TO_SMOOTH:
        return list(series)
    total = norm = 0.0
    points = []
    for step, value in series:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        points.append((step, total / norm))
    return points


def curves_of(rows: Iterable[Mapping[str, Any]], notes: Sequence[str] = ()) -> Curves:
    """The metrics of rows with a step. If a step has two rows, the later one counts."""
    unique = {row["step"]: row for row in rows}
    return _curves([unique[step] for step in sorted(unique)], list(notes))


def metrics_row(text: str | bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is broken."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def _notes(broken: list[int], lines: int) -> list[str]:
    torn = [line for line in broken if line == lines]
    damaged = [line for line in broken if line != lines]
    notes = [f"metrics.jsonl: line {torn[0]} is incomplete and left out"] if torn else []
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        notes.append(f"metrics.jsonl: {len(damaged)} broken lines are left out ({shown})")
    return notes


def _curves(rows: Sequence[Mapping[str, Any]], notes: list[str]) -> Curves:
    names = sorted({name for row in rows for name in row if name != "step"})
    metrics = {name: [number(row.get(name)) for row in rows] for name in names}
    lost = {
        name: steps for name in names if (steps := [row["step"] for row in rows if name in row and _is_lost(row[name])])
    }
    numeric = {name: values for name, values in metrics.items() if name in lost or any(v is not None for v in values)}
    found = {row["step"]: row for row in rows}
    return Curves(
        [*found], numeric, lost, notes, {name: _by_problem(found, problems) for name, problems in PAIRED.items()}
    )


def _by_problem(rows: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, dict[str, float]]:
    """{step: {problem: value}} of the rows that have it."""
    found = {step: row[name] for step, row in rows.items() if isinstance(row.get(name), Mapping)}
    return {step: {key: v for key, v in one.items() if number(v) is not None} for step, one in found.items()}


def _is_lost(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def with_evaluations(curves: Curves, summary: Mapping[str, Any], samples: int = 0) -> Curves:
    """The curves with the evaluations before the first and after the last step, and the intervals of accuracies.

    summary: of the run; empty if it is of an earlier session. samples: of each problem; 0: no intervals.
    """
    curves = _with_outer(curves, summary)
    metrics = dict(curves.metrics)
    for name, values in curves.metrics.items():
        prefix, _, last = name.rpartition("/")
        if not samples or last not in ACCURACIES or not prefix.startswith("eval"):
            continue
        unknown: Series = [None] * len(values)
        counts = curves.metrics.get(f"{prefix}/problems", unknown)
        pairs = curves.metrics.get(f"{prefix}/pass@2", unknown) if last == "accuracy" else unknown
        limits = [
            None if v is None or not n else accuracy_interval(v, int(n), samples, p)
            for v, n, p in zip(values, counts, pairs, strict=True)
        ]
        metrics[name + LOW] = [None if pair is None else pair[0] for pair in limits]
        metrics[name + HIGH] = [None if pair is None else pair[1] for pair in limits]
    return replace(curves, metrics=metrics)


def _with_outer(curves: Curves, summary: Mapping[str, Any]) -> Curves:
    before = {name.removesuffix("_before"): v for name, v in summary.items() if name.endswith("_before")}
    after = {name: v for name, v in summary.items() if name.startswith("eval/") and not name.endswith("_before")}
    outer = {0: before} | ({curves.steps[-1]: after} if curves.steps else {})
    paired = {m: curves.by_problem.get(m, {}) | _by_problem(outer, problems) for m, problems in PAIRED.items()}
    curves = replace(curves, by_problem=paired)
    for step, values in outer.items():
        known = {name: value for name, text in values.items() if (value := number(text)) is not None}
        curves = _with_row(curves, step, known) if known else curves
    return curves


def _with_row(curves: Curves, step: int, values: Mapping[str, float]) -> Curves:
    """The curves with these values at a step, which is added at the start if it is missing."""
    steps = curves.steps if step in curves.steps else [step, *curves.steps]
    at, added = steps.index(step), len(steps) - len(curves.steps)
    gap: Series = [None] * added
    metrics = {name: [*gap, *series] for name, series in curves.metrics.items()}
    for name, value in values.items():
        series = metrics.setdefault(name, [None] * len(steps))
        series[at] = value
    return replace(curves, steps=steps, metrics=metrics)


def accuracy_interval(accuracy: float, problems: int, samples: int, pass_2: MaybeNumber = None) -> tuple[float, float]:
    """The 95 % interval of an accuracy over problems: Wilson's, as in `grpocli eval`.

    Several samples of a problem count as more than one draw, by the design effect, which pass@2 determines: it has the
    spread of the problems' accuracies. Without pass@2 each problem counts as one draw.
    """
    p = min(max(accuracy, 0.0), 1.0)
    draws = float(problems)
    if pass_2 is not None and samples > 1 and 0 < p < 1:
        wrong = samples * (1 - p)
        variance = (samples * (samples - 1) * (1 - pass_2) + wrong - wrong**2) / samples**2
        apart = problems * max(0.0, variance) + 2 * p * (1 - p)
        draws *= max(1.0, p * (1 - p) * (problems + 1) / apart)
    z = NormalDist().inv_cdf(0.975)
    center, reach = p + z**2 / (2 * draws), z * math.sqrt(p * (1 - p) / draws + (z / (2 * draws)) ** 2)
    low, high = ((center + side * reach) / (1 + z**2 / draws) for side in (-1, 1))
    return max(0.0, min(low, p)), min(1.0, max(high, p))


def thinned(runs: Sequence[Curves], most: int, steps: Iterable[int] = ()) -> tuple[list[Curves], str]:
    """About `most` of the steps of runs, unchanged, and a sentence that says which; "" if all are kept.

    All runs keep the same steps, so that a mean over seeds is over all of them. steps: always kept, as are evaluations,
    the first and last steps and the extremes of every metric.
    """
    every = sorted({step for one in runs for step in one.steps})
    if len(every) <= most:
        return list(runs), ""
    kept = {every[0], every[-1]} | set(steps).intersection(every) | _extreme_steps(runs, most)
    kept |= {step for one in runs if one.steps for step in (one.steps[0], one.steps[-1])}
    width = math.ceil(len(every) * len(WATCHED) * len(runs) / most)
    for start in range(0, len(every), width):
        first, last = every[start], every[min(start + width, len(every)) - 1]
        for one in runs:
            rows = range(bisect_left(one.steps, first), bisect_right(one.steps, last))
            kept |= {one.steps[i] for i in _extremes(one, rows)}
    drawn = [one.rows(i for i, step in enumerate(one.steps) if step in kept) for one in runs]
    names = "the highest and lowest reward, the highest gradient norm, length and mismatch, the lowest entropy"
    whose = f", of each of {len(runs)} runs" if len(runs) > 1 else ""
    rule = f"{len(kept):,} of {len(every):,} steps are drawn: of each {width} steps those with {names}{whose}"
    return drawn, f"{rule}; all evaluations; the extremes of every metric. No value is an average."


def _extreme_steps(runs: Sequence[Curves], most: int) -> set[int]:
    """The steps of evaluations, and of the lowest and highest value of each metric among the runs."""
    found: set[int] = set()
    for name in {name for one in runs for name in one.metrics}:
        known = [(value, step) for one in runs for step, value in one.series(name)]
        if name.startswith("eval/") and len(known) <= len(runs) * most // 2:
            found.update(step for _, step in known)
        elif known:
            found.update((min(known)[1], max(known)[1]))
    return found


def _extremes(curves: Curves, rows: range) -> set[int]:
    """The rows of WATCHED, and the last row."""
    found = set(rows[-1:])
    for name, extreme in WATCHED:
        values = curves.metrics.get(name, [])
        known = [(value, i) for i in rows if values and (value := values[i]) is not None]
        if known:
            found.add(extreme(known)[1])
    return found
