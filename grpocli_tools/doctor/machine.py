"""The machine that `grpocli doctor` looks at: its environment, its folders, its packages and its commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from grpocli.hub import ask
from grpocli.processes.threads import run_in_thread
from grpocli.text import one_line, shorten

if TYPE_CHECKING:
    from grpocli.progress import Progress

T = TypeVar("T")

MISSING = 127
"""The exit code of a command that does not exist, as in a shell."""
COMMAND_SECONDS, PROBE_SECONDS = 10.0, 90.0
"""The deadlines of a command, and of a program that loads libraries."""
PROBES = 2 * PROBE_SECONDS + 3 * COMMAND_SECONDS
"""Seconds of a check that waits for probes and commands, which have their own deadlines."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ended. code: its exit code; None if it was killed at its deadline."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def reason(self) -> str:
        """Why it failed: its last line of standard error, the signal that ended it, or its deadline."""
        if self.code is None:
            return "it did not end in time"
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self.code}"

    def answers(self) -> dict[str, Any]:
        """The JSON objects that a probe printed, one a line, merged; other lines are left out."""
        merged: dict[str, Any] = {}
        for line in self.out.splitlines():
            if line.startswith("{"):
                with suppress(ValueError):
                    merged |= json.loads(line)
        return merged


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution. requires: its requirements, as its metadata spells them."""

    name: str
    version: str
    requires: tuple[str, ...] = ()


RunCommand = Callable[[Sequence[str], float, Mapping[str, str]], Ended]
"""Runs a command within seconds, in an environment."""


def run_command(command: Sequence[str], seconds: float, environ: Mapping[str, str]) -> Ended:
    """Run a command in a new session; at the deadline the whole session is killed."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Ended(None, process.communicate()[0])
    return Ended(process.returncode, out, err)


def installed_packages() -> dict[str, Package]:
    """The installed distributions by their normalized names; the first on the path counts.

    Distributions whose metadata is missing or unreadable, such as the rest of a broken installation, are left out.
    """
    from packaging.utils import canonicalize_name

    found: dict[str, Package] = {}
    for one in distributions():
        with suppress(UnicodeError, OSError, KeyError, TypeError):
            name, version = one.metadata["Name"], one.metadata["Version"]
            if name and version:
                found.setdefault(canonicalize_name(name), Package(name, version, tuple(one.requires or ())))
    return found


@dataclass(frozen=True)
class Machine:
    """Everything that the checks look at, so that a test can break each thing."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: Path = field(default_factory=Path.cwd)
    """The working folder."""
    root: Path = Path("/")
    """The folder that holds proc, sys, dev and etc."""
    python: str = sys.executable
    """The interpreter that probes run with."""
    command: RunCommand = run_command
    packages: Callable[[], Mapping[str, Package]] = installed_packages
    disk_usage: Callable[[Path], Any] = shutil.disk_usage
    reach: Callable[[str], str] = ask
    """Why a server does not answer, as a phrase; "" if it does."""
    _kept: dict[str, Any] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def installed(self) -> Mapping[str, Package]:
        """The installed packages, which are listed once: reading their metadata takes a quarter of a second."""
        return self.once("packages", self.packages)

    def run(self, command: Sequence[str], seconds: float = COMMAND_SECONDS) -> Ended:
        found = shutil.which(command[0], path=self.environ.get("PATH", os.defpath))
        if found is None:
            return Ended(MISSING, err=f"{command[0]}: not found")
        return self.command([found, *command[1:]], seconds, self.environ)

    def has(self, command: str) -> bool:
        return shutil.which(command, path=self.environ.get("PATH", os.defpath)) is not None

    def probe(self, name: str, *words: str) -> Ended:
        """Run a program of probes.py. The working folder is not on its path, so a torch.py there is not imported."""
        return self.run([self.python, "-P", str(Path(__file__).with_name("probes.py")), name, *words], PROBE_SECONDS)

    def text(self, path: str) -> str:
        """The content of a file below `root`; "" if it cannot be read."""
        with suppress(OSError):
            return (self.root / path).read_text(errors="replace")
        return ""

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of the first call with this name. Other threads wait for it."""
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._kept:
                self._kept[name] = make()
            result: T = self._kept[name]
            return result


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
