"""Renders the results table of docs/evidence/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence

from chaos.runner import KINDS, PASSED, SKIPPED, Outcome
from chaos.trial import Kind, NumberedTrial

BEGIN, END = "<!-- chaos -->", "<!-- end of chaos -->"
HEAD = ["kind", "planned", "run", "passed", "failed", "skipped"]


def as_markdown(trials: Sequence[NumberedTrial], outcomes: Sequence[Outcome]) -> str:
    """One line for each kind: the planned, run and passed attacks, and the numbers of failed trials."""
    rows = [_row(kind, trials, outcomes) for kind in KINDS if any(one.kind is kind for one in trials)]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [HEAD, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def replaced(page: str, table: str) -> str:
    """The page with this table between the two markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def _row(kind: Kind, trials: Sequence[NumberedTrial], outcomes: Sequence[Outcome]) -> list[str]:
    own = [outcome for outcome in outcomes if outcome.numbered.kind is kind]
    planned = sum(one.trial.attacks for one in trials if one.kind is kind)
    run = [outcome for outcome in own if outcome.failed or outcome.word == PASSED]
    failed = sorted(outcome.numbered.number for outcome in own if outcome.failed)
    reasons = sorted({outcome.reason for outcome in own if outcome.word == SKIPPED})
    skipped = sum(outcome.numbered.trial.attacks for outcome in own if outcome.word == SKIPPED)
    return [
        kind.name,
        f"{planned:,}",
        f"{sum(outcome.numbered.trial.attacks for outcome in run):,}",
        f"{sum(outcome.numbered.trial.attacks for outcome in run if not outcome.failed):,}",
        ", ".join(map(str, failed)) or "none",
        f"{skipped:,}: {'; '.join(reasons)}" if skipped else "0",
    ]
