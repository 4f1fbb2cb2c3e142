"""The ways to isolate a process: bubblewrap if it is installed, else the kernel's namespaces, entered by ourselves."""

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
"""The code that a sandboxed process starts with. With our namespaces the process imports it before it enters them."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python interpreter that runs programs. folders: those that it needs to read."""

    path: str
    options: Sequence[str]
    folders: Sequence[str]


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to isolate a process.

    command: from the size of /tmp in MB, the words before the interpreter's command line.
    order: fields for `inside.main`, which does the rest from within the process.
    """

    name: str
    python: Interpreter
    command: Callable[[int], list[str]]
    order: dict[str, Any]


@lru_cache(maxsize=8)
def interpreter(path: str | None) -> Interpreter:
    """The interpreter at `path` with its installed packages; None is this one, without them.

    Raises OSError or subprocess.SubprocessError if it does not start.
    """
    if path is None:
        real = os.path.realpath(sys.executable)
        return Interpreter(real, ("-S",), _with_targets([sys.base_prefix]))
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    output = subprocess.run([path, "-I", "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    return Interpreter(path, (), _with_targets(output.split("\n")[:2]))


def _with_targets(folders: Sequence[str]) -> tuple[str, ...]:
    """The folders and the targets of links, through which an interpreter started by a link finds its library."""
    return tuple(dict.fromkeys(path for folder in folders for path in (folder, os.path.realpath(folder))))


def bubblewrap(python: Interpreter, program: str) -> Backend:
    """Isolation by bubblewrap (https://github.com/containers/bubblewrap), at the path `program`."""

    def command(disk_mb: int) -> list[str]:
        shown = [arg for path in _existing(SYSTEM) for arg in _shown(path)]
        shown += [arg for path in (*python.folders, INSIDE) for arg in ("--ro-bind", os.path.realpath(path), path)]
        tmp = ["--size", str(disk_mb * 2**20), "--tmpfs", "/tmp"]  # first, since an interpreter may be below /tmp
        closed = ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [
            program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--uid", "65534", "--gid", "65534", *tmp, *shown, "--dev", "/dev", *closed, "--chdir", "/tmp", "--",
        ]  # fmt: skip

    return Backend("bubblewrap", python, command, {"namespaces": False, "isolated": True, "readable": []})


def namespaces(python: Interpreter) -> Backend:
    """Isolation by the kernel's namespaces, which the process enters itself: see `inside.namespaces`."""
    readable = [(path, path) for path in SYSTEM]
    readable += [(os.path.realpath(path), path) for path in python.folders if not path.startswith("/usr/")]
    return Backend("namespaces", python, lambda _: [], {"namespaces": True, "isolated": True, "readable": readable})


def no_isolation(python: Interpreter) -> Backend:
    """Only resource limits: the program can do everything that the user can."""
    return Backend("none", python, lambda _: [], {"namespaces": False, "isolated": False, "readable": []})


def available_backends(python: Interpreter) -> list[Backend]:
    """The backends that may work on this machine, the preferred one first."""
    if not sys.platform.startswith("linux"):
        return []
    installed = shutil.which("bwrap")
    return [*([bubblewrap(python, installed)] if installed else []), namespaces(python)]


def _existing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.lexists(path)]


def _shown(path: str) -> list[str]:
    link = Path(path)
    return ["--symlink", str(link.readlink()), path] if link.is_symlink() else ["--ro-bind", path, path]
