"""Checks that run at the same time, each with a deadline, and their findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpocli.processes.threads import run_in_thread
from grpocli.text import one_line, shorten

if TYPE_CHECKING:
    from grpocli.progress import Progress
    from grpocli_tools.doctor.machine import Machine

GIB = 2**30
FindingStatus = Literal["ok", "warning", "error", "-"]
"""`error`: the run cannot start or will fail. `warning`: it runs, but something deserves a look. `-`: not needed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result."""

    name: str
    status: FindingStatus
    detail: str
    """What was found."""
    advice: str = ""
    """What to do, as a command where there is one."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs: this decides whether a finding is an error or a warning.

    A text is the choice that needs it, such as "engine=vllm", and "" if none does. The defaults are those of `grpocli
    train` without overrides.
    """

    vllm: str = ""
    cuda: str = ""
    hub: str = ""
    slurm: str = ""
    sandbox: str = ""
    python: str | None = None
    """The interpreter of the sandbox; None: this one."""
    runs: Path | None = None
    """The folder that the run's folder is in; None: runs/ in the working folder."""


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One check, which may have several findings."""

    group: str
    name: str
    find: Callable[[Machine, Needs], Iterable[Finding]]
    seconds: float = 15.0
    """Its deadline, above that of a command (`COMMAND_SECONDS`)."""


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
    """An error if the run needs it, else a warning, or what `otherwise` says."""
    return Finding(name, "error" if needed else otherwise, detail, advice)


def examine(checks: Sequence[MachineCheck], machine: Machine, needs: Needs, progress: Progress) -> list[FindingGroup]:
    """The findings of all checks, grouped. A check that hangs or fails is a warning with its name."""
    began = time.monotonic()
    # the slowest first, so that the others run beside them
    work = {
        check: run_in_thread(partial(_findings, check, machine, needs), check.name)
        for check in sorted(checks, key=lambda one: -one.seconds)
    }
    found: dict[MachineCheck, list[Finding]] = {}
    while waiting := [check for check in checks if check not in found]:
        wait([work[check] for check in waiting], 0.1, FIRST_COMPLETED)
        names = ", ".join(check.name for check in waiting[:3])
        progress(0, 0, f"{len(found)} of {len(checks)} checks", f"waiting for {names}")
        for check in waiting:
            if work[check].done():
                found[check] = work[check].result()
            elif time.monotonic() - began >= check.seconds:
                found[check] = [_hung(check)]
    titles = dict.fromkeys(check.group for check in checks)
    return [
        FindingGroup(title, tuple(one for check in checks if check.group == title for one in found[check]))
        for title in titles
    ]


def _findings(check: MachineCheck, machine: Machine, needs: Needs) -> list[Finding]:
    try:
        return list(check.find(machine, needs))
    except Exception as error:  # noqa: BLE001 - one failed check must not hide the others
        reason = shorten(one_line(str(error)), 200) or "no message"
        advice = "report it as a bug of grpocli, with the output of `grpocli doctor --json`"
        return [warning(check.name, f"this check failed: {type(error).__name__}: {reason}", advice)]


def _hung(check: MachineCheck) -> Finding:
    return warning(
        check.name,
        f"this check did not end within {check.seconds:g} s",
        "grpocli doctor once more on a less busy machine; df and nvidia-smi hang if a file system or the driver does",
    )
