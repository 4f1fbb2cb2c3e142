"""Checks that run at the same time, each with a deadline, and their findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from grpocli.processes.threads import run_in_thread

if TYPE_CHECKING:
    from grpocli.progress import Progress
    from grpocli_tools.doctor.machine import Machine
    from grpocli_tools.doctor.needs import Needs

FindingStatus = Literal["ok", "warning", "error", "-"]
"""`error`: the run cannot start or will fail. `warning`: it runs, but something deserves a look. `-`: not needed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result. detail: what was found. advice: what to do, as a command where there is one."""

    name: str
    status: FindingStatus
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One check, which may have several findings. seconds: its deadline."""

    group: str
    name: str
    find: Callable[[Machine, Needs], Iterable[Finding]]
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """The findings below one heading."""

    title: str
    findings: tuple[Finding, ...]


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def not_needed(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, "-", detail, advice)


def warning(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, "warning", detail, advice)


def problem(name: str, detail: str, advice: str, needed: object, otherwise: FindingStatus = "warning") -> Finding:
    """An error if the run needs it, else a warning, or what `otherwise` says; "ok" needs no advice."""
    status: FindingStatus = "error" if needed else otherwise
    return Finding(name, status, detail, "" if status == "ok" else advice)


def examine(checks: Sequence[MachineCheck], machine: Machine, needs: Needs, progress: Progress) -> list[FindingGroup]:
    """The findings of all checks, grouped. A check that hangs or fails is a warning with its name."""
    began = time.monotonic()
    # the slowest first, so that the others run beside them
    slowest_first = sorted(enumerate(checks), key=lambda one: -one[1].seconds)
    work = {
        number: run_in_thread(partial(_findings, check, machine, needs), check.name) for number, check in slowest_first
    }
    found: dict[int, list[Finding]] = {}
    while waiting := [number for number in range(len(checks)) if number not in found]:
        wait([work[number] for number in waiting], 0.1, FIRST_COMPLETED)
        now = time.monotonic() - began
        # without a share: the last check may take longer than all others together
        most = max(checks[number].seconds for number in waiting) - now
        names = ", ".join(checks[number].name for number in waiting[:3])
        progress(0, 0, f"{len(found)} of {len(checks)} checks", f"{names}: at most {max(most, 0):.0f} s more")
        for number in waiting:
            if work[number].done():
                found[number] = work[number].result()
            elif now >= checks[number].seconds:
                found[number] = [_hung(checks[number])]
    return grouped(checks, found)


def grouped(checks: Sequence[MachineCheck], found: dict[int, list[Finding]]) -> list[FindingGroup]:
    """The findings below the headings of their checks, in the order of the checks."""
    titles = list(dict.fromkeys(check.group for check in checks))
    return [
        FindingGroup(
            title, tuple(one for number, check in enumerate(checks) if check.group == title for one in found[number])
        )
        for title in titles
    ]


def _findings(check: MachineCheck, machine: Machine, needs: Needs) -> list[Finding]:
    try:
        return list(check.find(machine, needs))
    except Exception as error:  # noqa: BLE001 - one failed check must not hide the others
        reason = " ".join(str(error).split())[:200] or "no message"
        advice = "report it as a bug of grpocli, with the output of `grpocli doctor --json`"
        return [warning(check.name, f"this check failed: {type(error).__name__}: {reason}", advice)]


def _hung(check: MachineCheck) -> Finding:
    return warning(
        check.name,
        f"this check did not end within {check.seconds:g} s",
        "grpocli doctor once more on a less busy machine; df and nvidia-smi hang if a file system or the driver does",
    )
