"""How a process is shut in: by bubblewrap where that is installed, else by namespaces of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
INSIDE = str(Path(__file__).parent / "inside")
"""What a sandboxed process begins with; in namespaces of ours it has it before it enters them."""


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter that code runs with, and what of the machine it needs to see."""

    path: str
    options: Sequence[str]
    folders: Sequence[str]


@dataclass(frozen=True, slots=True)
class Way:
    """command: what comes before the interpreter's own, given the size of /tmp in MB. order: for `inside.main`."""

    name: str
    python: Python
    command: Callable[[int], list[str]]
    order: dict[str, Any]


@lru_cache(maxsize=8)
def python_of(path: str | None) -> Python:
    """Ours without the installed packages, or the one at `path` with its own.

    Raises OSError or subprocess.SubprocessError where that does not start.
    """
    if path is None:
        real = os.path.realpath(sys.executable)
        return Python(real, ("-S",), _with_targets([sys.base_prefix]))
    ask = "import sys; print(sys.prefix); print(sys.base_prefix)"
    said = subprocess.run([path, "-I", "-c", ask], check=True, capture_output=True, text=True, timeout=60).stdout
    return Python(path, (), _with_targets(said.split("\n")[:2]))


def _with_targets(folders: Sequence[str]) -> tuple[str, ...]:
    """Also where they really are: an interpreter that is reached by a link finds its library there."""
    return tuple(dict.fromkeys(path for folder in folders for path in (folder, os.path.realpath(folder))))


def bubblewrap(python: Python, program: str) -> Way:
    """https://github.com/containers/bubblewrap."""

    def command(disk_mb: int) -> list[str]:
        shown = [arg for path in _existing(SYSTEM) for arg in _shown(path)]
        shown += [arg for path in (*python.folders, INSIDE) for arg in ("--ro-bind", os.path.realpath(path), path)]
        tmp = ["--size", str(disk_mb * 2**20), "--tmpfs", "/tmp"]  # first: an interpreter may be below it
        closed = ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [
            program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--uid", "65534", "--gid", "65534", *tmp, *shown, "--dev", "/dev", *closed, "--chdir", "/tmp", "--",
        ]  # fmt: skip

    return Way("bubblewrap", python, command, {"namespaces": False, "shut_in": True, "readable": []})


def namespaces(python: Python) -> Way:
    """The kernel's namespaces, entered by the process itself: `inside.namespaces`."""
    readable = [(path, path) for path in SYSTEM]
    readable += [(os.path.realpath(path), path) for path in python.folders if not path.startswith("/usr/")]
    return Way("namespaces", python, lambda _: [], {"namespaces": True, "shut_in": True, "readable": readable})


def unsafe(python: Python) -> Way:
    """Limits on resources, and nothing else: the code may do what the user may."""
    return Way("none", python, lambda _: [], {"namespaces": False, "shut_in": False, "readable": []})


def ways(python: Python) -> list[Way]:
    """What may work here, the better one first."""
    if not sys.platform.startswith("linux"):
        return []
    installed = shutil.which("bwrap")
    return [*([bubblewrap(python, installed)] if installed else []), namespaces(python)]


def _existing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.lexists(path)]


def _shown(path: str) -> list[str]:
    link = Path(path)
    return ["--symlink", str(link.readlink()), path] if link.is_symlink() else ["--ro-bind", path, path]
