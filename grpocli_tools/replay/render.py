"""The report of a replay, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from grpocli.text import clean, counted, one_line, shorten
from grpocli_tools.console import CleanConsole
from grpocli_tools.replay import step_replay as limits
from grpocli_tools.replay.replay import StepReport
from grpocli_tools.replay.step_replay import Check, Difference, total

SHOWN = 5
"""Differences shown of each check; --json has all."""
NAMES = {
    "logprobs": "sampler's log-prob",
    "trainer_logprobs": "log-prob",
    "entropies": "entropy",
    "completion_ids": "token",
    "version": "weight version",
}
"""Names of columns in sentences."""
LONGEST = 60


def as_dict(run: Path, reports: Sequence[StepReport]) -> dict[str, Any]:
    steps = [
        {
            "step": one.step,
            "asked": one.asked,
            "agrees": one.agrees,
            "from": one.origin,
            "exact": one.exact,
            "dtype": one.dtype,
            "checks": [asdict(check) | {"differ": check.differ, "unchecked": check.unchecked} for check in one.checks],
        }
        for one in reports
    ]
    return {"run": str(run), "agrees": all(one.agrees for one in reports), "steps": steps}


def as_text(run: Path, reports: Sequence[StepReport]) -> str:
    """A table of the checks, then the differences and what cannot be checked."""
    checks = total(check for report in reports for check in report.checks)
    lines = [_heading(run, reports), _table(checks)]
    said: set[str] = set()
    for check in checks:  # two checks may find the same difference
        new = [sentence for one in check.differences if (sentence := _sentence(one)) not in said]
        said |= set(new)
        lines += new[:SHOWN]
        if len(new) > SHOWN:
            lines.append(f"  ... and {len(new) - SHOWN:,} more of {check.name}")
    lines += [f"cannot be checked: {c.name}: {n:,} {c.unit}: {why}" for c in checks for why, n in c.why.items()]
    wrong = [str(one.step) for one in reports if not one.agrees]
    verdict = f"the record differs in step {', '.join(wrong[:10])}{' ...' if len(wrong) > 10 else ''}"
    lines.append(verdict if wrong else "everything that can be checked agrees")
    return "\n".join(clean(line.rstrip("\n")) for line in lines)


def _heading(run: Path, reports: Sequence[StepReport]) -> str:
    asked = [one.step for one in reports if one.asked]
    steps = f"step {asked[0]}" if len(asked) == 1 else f"steps {asked[0]} to {asked[-1]}"
    leading, way = len(reports) - len(asked), ""
    if leading:
        way = f", {counted(leading, 'earlier step')} checked too, except for rewards"
    how = "no weights were computed"
    if not all(one.exact is None for one in reports):
        how = "recomputed to the bit"
    if any(one.exact is False for one in reports):
        dtype = next(one.dtype for one in reports if one.dtype)
        relative, absolute = limits.METRIC_TOLERANCE[dtype]
        how = f"{limits.LOGP_TOLERANCE[dtype]:g} nats, metrics {relative:g} relative or {absolute:g}"
        how = f"recomputed within rounding ({dtype}: {how})"
    return f"{run}: {steps} replayed from {reports[0].origin or 'the record alone'}{way}; {how}"


def _table(checks: Sequence[Check]) -> str:
    table = Table(box=SIMPLE_HEAD)
    for name in ("check", "agree", "differ", "not checked", "of"):
        table.add_column(name, justify="left" if name in ("check", "of") else "right")
    for check in checks:
        table.add_row(check.name, f"{check.agree:,}", f"{check.differ:,}", f"{check.unchecked:,}", check.unit)
    out = StringIO()
    CleanConsole(file=out, width=100).print(table)
    return out.getvalue()


def _sentence(one: Difference) -> str:
    places = [("step", one.step), ("group", one.group), ("completion", one.completion), ("token", one.token)]
    where = ", ".join(f"{name} {number}" for name, number in places if number is not None)
    token = f" ({one.token_text!r})" if one.token_text else ""
    name = NAMES.get(one.what, one.what)
    return f"{where}{token}: recorded {name} {_value(one.recorded)}, recomputed {_value(one.recomputed)}"


def _value(value: Any) -> str:
    text = one_line("nothing" if value is None else str(value))
    return shorten(text, LONGEST)
