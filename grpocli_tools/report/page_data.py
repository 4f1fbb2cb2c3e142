"""The data of a page about one or several runs. `dataclasses.asdict` makes it the JSON that the page's script reads.

Every text may come from a model, a dataset or a config: the page shows it as text, never as markup. Numbers that are
missing or not finite are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
