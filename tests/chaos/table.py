"""The table of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence

from chaos.kinds import KINDS
from chaos.trial import Kind, Numbered
from chaos.tries import HELD, LEFT_OUT, Outcome

BEGIN, END = "<!-- chaos -->", "<!-- end of chaos -->"
HEAD = ["kind", "asked", "tried", "held", "lost", "left out"]


def as_markdown(trials: Sequence[Numbered], outcomes: Sequence[Outcome]) -> str:
    """One line a kind: attacks asked for, tried and held, and the numbers of the lost ones."""
    rows = [_row(kind, trials, outcomes) for kind in KINDS if any(one.kind is kind for one in trials)]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [HEAD, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def replaced(page: str, table: str) -> str:
    """The page with this table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"that page has no {BEGIN} and {END} for the table")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def _row(kind: Kind, trials: Sequence[Numbered], outcomes: Sequence[Outcome]) -> list[str]:
    own = [outcome for outcome in outcomes if outcome.numbered.kind is kind]
    asked = sum(one.trial.attacks for one in trials if one.kind is kind)
    tried = [outcome for outcome in own if outcome.lost or outcome.word == HELD]
    lost = sorted(outcome.numbered.number for outcome in own if outcome.lost)
    reasons = sorted({outcome.reason for outcome in own if outcome.word == LEFT_OUT})
    left_out = sum(outcome.numbered.trial.attacks for outcome in own if outcome.word == LEFT_OUT)
    return [
        kind.name,
        f"{asked:,}",
        f"{sum(outcome.numbered.trial.attacks for outcome in tried):,}",
        f"{sum(outcome.numbered.trial.attacks for outcome in tried if not outcome.lost):,}",
        ", ".join(map(str, lost)) or "none",
        f"{left_out:,}: {'; '.join(reasons)}" if left_out else "0",
    ]
