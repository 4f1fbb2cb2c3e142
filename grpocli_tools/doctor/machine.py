"""The machine that `grpocli doctor` looks at: its environment, its folders, its packages and its commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

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


_RUNNING: set[int] = set()
"""The sessions of commands that have not ended."""
_STARTING = threading.Lock()
"""Held while a command starts, so that one that has started is known."""


def end_commands() -> None:
    """Kill the commands that still run, with what they started."""
    with _STARTING:
        for session in _RUNNING:
            _kill(session)


def _kill(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def run_command(command: Sequence[str], seconds: float, environ: Mapping[str, str]) -> Ended:
    """Run a command in a new session; at the deadline the whole session is killed."""
    with _STARTING:
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
        _RUNNING.add(process.pid)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process.pid)
        return Ended(None, _rest(process))
    finally:
        with _STARTING:
            _RUNNING.discard(process.pid)
    return Ended(process.returncode, out, err)


def _rest(process: subprocess.Popen[str]) -> str:
    """The output of a killed command; empty if a process that it left behind keeps the pipes open."""
    try:
        return process.communicate(timeout=1.0)[0]
    except subprocess.TimeoutExpired:
        return ""


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


def reach(url: str) -> str:
    """Why a server does not answer, as a phrase; "" if it does."""
    from grpocli.hub import ask

    return ask(url)


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
    reach: Callable[[str], str] = reach
    _kept: dict[str, Any] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def installed(self) -> Mapping[str, Package]:
        """The installed packages, which are listed once: reading their metadata takes a quarter of a second."""
        return self.once("packages", self.packages)

    def run(self, command: Sequence[str], seconds: float = COMMAND_SECONDS) -> Ended:
        """Run a command of this machine's PATH within a deadline."""
        found = shutil.which(command[0], path=self.environ.get("PATH", os.defpath))
        if found is None:
            return Ended(MISSING, err=f"{command[0]}: not found")
        return self.command([found, *command[1:]], seconds, self.environ)

    def has(self, command: str) -> bool:
        """Whether a command is on the PATH."""
        return shutil.which(command, path=self.environ.get("PATH", os.defpath)) is not None

    def probe(self, name: str, *words: str) -> Ended:
        """Run a program of `probes/`. The working folder is not on its path, so a torch.py there is not imported."""
        file = Path(__file__).parent / "probes" / f"{name}.py"
        return self.run([self.python, "-P", str(file), *words], PROBE_SECONDS)

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
