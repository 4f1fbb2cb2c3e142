"""The data of a page about one or several runs. `dataclasses.asdict` makes it the JSON that the page's script reads.

Every text may come from a model, a dataset or a config: the page shows it as text, never as markup. Numbers that are
missing or not finite are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpocli.runs.metrics import number
from grpocli_tools.evaluation.significance import Paired, interval, wilson

MaybeNumber = float | int | None
Series = list[MaybeNumber]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart. metric: its name in metrics.jsonl. low, high: metrics of an interval around it, or ""."""

    metric: str
    label: str
    low: str = ""
    high: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: lines over steps with one vertical axis. section: the heading it stands below."""

    id: str
    title: str
    section: str
    lines: list[ChartLine]
    help: str = ""
    unit: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class RunWarning:
    """Numbers that look wrong.

    step: the first step with them. text: what was seen. meaning: what it means. advice: which keys to change. chart:
    the id of the chart that shows it, or "".
    """

    step: int
    kind: str
    text: str
    meaning: str
    advice: str
    chart: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run learned.

    level: `good`, `unclear` or `bad`. word: the change in a word or two, such as `learned`. text: one sentence. look:
    what to look at first.
    """

    level: str
    word: str
    text: str
    look: str = ""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt, shared by all groups of the same text.

    messages: the conversation as {role, content}; None for a plain text. answer: the reference answer, if there is one.
    """

    task: str
    text: str
    messages: list[dict[str, str]] | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class CompletionView:
    """A completion to read.

    tokens: the text of each token; None if the tokenizer is missing. The lists below have a value for each token:
    mask (1: in the loss), logp (the sampler's), trainer_logp, entropy (nats), ratio (of the last update) and clipped
    (1: the objective cut its gradient off in an update); None if they were not recorded.
    episode: the turns of an episode as {role, content}.
    """

    text: str
    status: str
    finish: str
    length: int
    version: int
    reward: MaybeNumber
    rewards: dict[str, MaybeNumber]
    advantage: MaybeNumber
    episode: list[dict[str, str]] | None = None
    tokens: list[str] | None = None
    mask: list[int] | None = None
    logp: Series | None = None
    trainer_logp: Series | None = None
    entropy: Series | None = None
    ratio: Series | None = None
    clipped: list[int] | None = None


@dataclass(frozen=True, slots=True)
class GroupView:
    """The completions of one prompt in one step. prompt: its number in `PageData.prompts`."""

    step: int
    group: int
    uid: str
    prompt: int
    completions: list[CompletionView]


@dataclass(frozen=True, slots=True)
class RolloutSelection:
    """The completions of a run that the page has.

    rule: a sentence that says which they are; "" if they are all. total: how many the run has. steps: the steps that
    have a rollout file.
    """

    rule: str = ""
    total: int = 0
    steps: list[int] = field(default_factory=list)
    groups: list[GroupView] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunView:
    """A run.

    id: short and unique on the page. name: its folder, as short as is unambiguous. label: how it differs from the other
    runs; the name if it does not. group: runs of one group differ only in the seed. state: `running`, `done`,
    `stopped`, `failed` or `unfinished`. facts: (label, value) rows of what ran. formula: lines of its objective.
    overrides: its command line. sessions: (steps, start, versions and changes) of each. starts: the steps done before
    each session but the first. notice: why it ended early, or has more steps than it was asked for; "" if neither.
    resume: the command that continues it; "" if it is done. total_steps: that it was asked for. steps: those of
    `metrics`, which has a number or None for each; with many steps only some are there, and `thinning` says which.
    """

    id: str
    name: str
    path: str
    label: str
    group: str
    state: str
    total_steps: int
    verdict: Verdict
    facts: list[tuple[str, str]]
    formula: list[str]
    overrides: list[str]
    sessions: list[tuple[str, str, str]]
    warnings: list[RunWarning]
    steps: list[int]
    metrics: dict[str, Series]
    starts: list[int] = field(default_factory=list)
    notice: str = ""
    resume: str = ""
    thinning: str = ""
    rollouts: RolloutSelection = field(default_factory=RolloutSelection)


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of texts and numbers, with the notes below it."""

    header: list[str]
    rows: list[list[Any]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PageData:
    """A page. prompts: those of all runs' groups. results, differences: tables of several runs; None for one run.

    live: the address of the live data, relative to the page; None for a file.
    """

    title: str
    made: str
    version: str
    charts: list[Chart]
    runs: list[RunView]
    prompts: list[PromptText] = field(default_factory=list)
    results: PageTable | None = None
    differences: PageTable | None = None
    notes: list[str] = field(default_factory=list)
    live: str | None = None


ACCURACIES = ("accuracy", "accuracy_greedy")
PAIRED = {"eval/accuracy": "eval/accuracy_by_problem", "eval/loss": "eval/loss_by_problem"}
"""Metrics that are compared problem by problem, with the names of their values."""
LOW, HIGH = " (low)", " (high)"
"""The ends of the names of an interval's limits, which are not in metrics.jsonl."""

FEWEST_TO_SMOOTH = 20


@dataclass(frozen=True, slots=True)
class Curves:
    """The metrics of a run."""

    steps: list[int] = field(default_factory=list)
    """In order."""
    metrics: dict[str, Series] = field(default_factory=dict)
    """A number or None for each step."""
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    """The steps at which a metric was recorded as null or NaN."""
    by_problem: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    """{metric of PAIRED: {step: {problem: value}}}."""
    changed: dict[str, tuple[int, str]] = field(default_factory=dict)
    """{"eval" or "reward": the step after which values can be compared, and why earlier ones cannot}."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Curves:
        """The metrics of rows with a step. If a step has two rows, the later one counts."""
        by_step = {row["step"]: row for row in rows}
        found = {step: by_step[step] for step in sorted(by_step)}
        metrics, lost = {}, {}
        for name in sorted({name for row in found.values() for name in row if name != "step"}):
            values = [number(row.get(name)) for row in found.values()]
            if steps := [step for step, row in found.items() if name in row and _is_lost(row[name])]:
                lost[name] = steps
            if steps or any(value is not None for value in values):
                metrics[name] = values
        return cls([*found], metrics, lost, {name: _by_problem(found, values) for name, values in PAIRED.items()})

    @property
    def last(self) -> int:
        return self.steps[-1] if self.steps else 0

    def comparable(self, metric: str) -> tuple[list[tuple[int, float]], str]:
        """`series` since a resume last changed what it measures; what was changed, or ""."""
        since, why = self.changed.get("eval" if metric.startswith("eval/") else "reward", (-1, ""))
        return [(step, value) for step, value in self.series(metric) if step > since], why

    def paired(self, metric: str, first: int, last: int) -> Paired | None:
        """The paired test of a metric at two steps; None if a step has no values by problem."""
        values = self.by_problem.get(metric, {})
        return Paired.of(values[first], values[last]) if first in values and last in values else None

    def limits(self, metric: str, step: int, value: float, problems: MaybeNumber) -> tuple[float, float] | None:
        """The 95 % interval of an accuracy, as in `grpocli eval`; None if the number of its problems is unknown.

        A metric whose values by problem are unknown counts each problem as one draw.
        """
        if known := self.by_problem.get(metric, {}).get(step):
            return interval([*known.values()])
        return wilson(min(max(value, 0.0), 1.0), problems) if problems else None

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of the steps that have the metric."""
        values = self.metrics.get(metric, [])
        return [(step, value) for step, value in zip(self.steps, values, strict=bool(values)) if value is not None]

    def rows(self, kept: Iterable[int]) -> Curves:
        """Only the rows with these numbers (not steps)."""
        numbers = sorted(kept)
        metrics = {name: [values[i] for i in numbers] for name, values in self.metrics.items()}
        return replace(self, steps=[self.steps[i] for i in numbers], metrics=metrics)


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


def _by_problem(rows: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, dict[str, float]]:
    """{step: {problem: value}} of the rows that have it."""
    found = {step: row[name] for step, row in rows.items() if isinstance(row.get(name), Mapping)}
    return {step: {key: v for key, v in one.items() if number(v) is not None} for step, one in found.items()}


def _is_lost(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def with_intervals(curves: Curves) -> Curves:
    metrics = dict(curves.metrics)
    for name, values in curves.metrics.items():
        prefix, _, last = name.rpartition("/")
        if last in ACCURACIES and prefix.startswith("eval"):
            counts = curves.metrics.get(f"{prefix}/problems", [None] * len(values))
            of_steps = zip(curves.steps, values, counts, strict=True)
            limits = [curves.limits(name, step, value, n) if value is not None else None for step, value, n in of_steps]
            metrics[name + LOW] = [pair and pair[0] for pair in limits]
            metrics[name + HIGH] = [pair and pair[1] for pair in limits]
    return replace(curves, metrics=metrics)


def with_evaluations(curves: Curves, summary: Mapping[str, Any]) -> Curves:
    """The curves with the evaluations before the first and after the last step.

    summary: of the run; empty if it is of an earlier session.
    """
    before = {name.removesuffix("_before"): v for name, v in summary.items() if name.endswith("_before")}
    after = {name: v for name, v in summary.items() if name.startswith("eval/") and not name.endswith("_before")}
    outer = {0: before} | ({curves.last: after} if curves.steps else {})
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


def thinned(runs: Sequence[Curves], most: int, steps: Iterable[int] = ()) -> tuple[list[Curves], str]:
    """About `most` of the steps of runs, unchanged, and a sentence that says which; "" if all are kept.

    All runs keep the same steps, so that a mean over seeds is over all of them. steps: always kept, as are evaluations,
    the first and last steps and the extremes of every metric.
    """
    every = sorted({step for one in runs for step in one.steps})
    if len(every) <= most:
        return list(runs), ""
    width = math.ceil(len(every) / most)
    kept = {*every[::width], every[-1]} | set(steps).intersection(every)
    kept |= {step for one in runs if one.steps for step in (one.steps[0], one.steps[-1])}
    for name in {name for one in runs for name in one.metrics}:
        known = [(value, step) for one in runs for step, value in one.series(name)]
        if name.startswith("eval/") and len(known) <= len(runs) * most // 2:
            kept.update(step for _, step in known)
        elif known:
            kept.update((min(known)[1], max(known)[1]))
    drawn = [one.rows(i for i, step in enumerate(one.steps) if step in kept) for one in runs]
    rule = f"{len(kept):,} of {len(every):,} steps are drawn: one of {width}, all evaluations and the extremes of every"
    return drawn, f"{rule} metric. No value is an average."
