"""The findings as text for a terminal and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpocli.text import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from grpocli_tools.doctor.checkup import Finding, FindingGroup

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "-": "dim"}


def errors(groups: Sequence[FindingGroup]) -> int:
    """The number of errors."""
    return sum(one.status == "error" for group in groups for one in group.findings)


def as_list(groups: Sequence[FindingGroup]) -> list[dict[str, str]]:
    """The findings as dicts with `name`, `status`, `detail` and `advice`."""
    return [dataclasses.asdict(one) for group in groups for one in group.findings]


def print_report(out: Console, groups: Sequence[FindingGroup], subject: str) -> None:
    """Print the findings below their headings, and a verdict on the subject ("the default run")."""
    width = max((len(one.name) for group in groups for one in group.findings), default=0)
    for group in groups:
        if group.findings:
            out.print(Text(group.title, style="bold"))
            out.print(Padding(_table(group.findings, width), (0, 0, 1, 2)))
    out.print(Text(verdict(groups, subject), style="bold"), soft_wrap=True)


def _table(findings: Sequence[Finding], width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=7)
    table.add_column(width=width)
    table.add_column(overflow="fold", ratio=1)
    for one in findings:
        table.add_row(Text(one.status, style=STYLES[one.status]), Text(one_line(one.name)), _detail(one))
    return table


def _detail(one: Finding) -> Text:
    """What was found, and what to do."""
    detail = Text(one_line(one.detail), style="dim" if one.status == "-" else "", overflow="fold")
    if one.advice and one.status in ("warning", "error"):
        detail.append(f"\n-> {one_line(one.advice)}", style="" if one.status == "warning" else "bold")
    return detail


def verdict(groups: Sequence[FindingGroup], subject: str) -> str:
    """The last line: whether the machine is ready."""
    wrong = errors(groups)
    warned = sum(one.status == "warning" for group in groups for one in group.findings)
    count = f"{warned} {'warning' if warned == 1 else 'warnings'}"
    if wrong:
        return f"Not ready for {subject}: {wrong} {'error' if wrong == 1 else 'errors'}, {count}."
    return f"Ready for {subject}: no errors, {count}."
