"""The ways to isolate a process, and the choice of the first that holds against a program that tries to escape.

They are bubblewrap if it is installed, else the kernel's namespaces, which the process enters itself.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO

from grpocli.sandbox.sandbox import Backend, Interpreter, Limits, SandboxError, Submission, run

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
INSIDE = str(Path(__file__).parent / "inside")
"""The code that a sandboxed process starts with. With our namespaces the process imports it before it enters them."""

PROBE_TIMEOUT = 60.0
"""Seconds; enough on a busy machine."""
FOUND = "AssertionError: "
PROGRAM = """
import os, socket

def tried(what, action):
    try:
        action()
    except (OSError, MemoryError):
        return []
    return [what]

def fork(n):
    children = []
    try:
        for _ in range(n):
            child = os.fork()
            if child == 0:
                import time
                time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)

def write(*paths, size=0):
    written = []
    try:
        for path in paths:
            with open(path, "wb") as file:
                written.append(path)
                file.write(bytes(size))
    finally:
        for path in written:
            os.remove(path)

def escapes(secrets, port, pid, memory_mb, processes, disk_mb):
    files = [f"/tmp/.escaped-{pid}-{i}" for i in range(disk_mb + 1)]
    return [
        *tried("read the passwords", lambda: open("/etc/shadow").read()),
        *(found for secret in secrets for found in tried("read " + secret, lambda: open(secret).read())),
        *tried("write into /usr", lambda: write("/usr/.escaped")),
        *tried("write into /", lambda: write("/.escaped")),
        *tried("write into /dev", lambda: write("/dev/.escaped")),
        *tried("reach a port of this machine", lambda: socket.create_connection(("127.0.0.1", port), 2)),
        *tried("see or end another process", lambda: os.kill(pid, 0)),
        *tried("take more memory than allowed", lambda: bytearray((memory_mb + 64) * 2**20)),
        *tried("start more processes than allowed", lambda: fork(processes + 2)),
        *tried("fill more of the disk than allowed", lambda: write(*files, size=2**20)),
    ]
"""


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
        shown = [arg for path in SYSTEM if os.path.lexists(path) for arg in _shown(path)]
        shown += [arg for path in (*python.folders, INSIDE) for arg in ("--ro-bind", os.path.realpath(path), path)]
        tmp = ["--size", str(disk_mb * 2**20), "--tmpfs", "/tmp"]  # first, since an interpreter may be below /tmp
        closed = ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [
            program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--uid", "65534", "--gid", "65534", *tmp, *shown, "--dev", "/dev", *closed, "--chdir", "/tmp", "--",
        ]  # fmt: skip

    return Backend("bubblewrap", python, command, {"namespaces": False, "isolated": True, "readable": []})


def namespaces(python: Interpreter) -> Backend:
    """Isolation by the kernel's namespaces, which the process enters itself: see `inside.isolation`."""
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


def _shown(path: str) -> list[str]:
    link = Path(path)
    return ["--symlink", str(link.readlink()), path] if link.is_symlink() else ["--ro-bind", path, path]


def select_backend(python: str | None, limits: Limits) -> str:
    """The name of the first available backend that holds, for `backend_named`.

    Raises SandboxError if none holds, OSError or subprocess.SubprocessError if `python` does not start.
    """
    reasons = []
    for backend in available_backends(interpreter(python)):
        try:
            reason = escapes(backend, limits)
        except SandboxError as error:
            reason = str(error)
        if not reason:
            return backend.name
        reasons.append(f"{backend.name}: {reason}")
    raise SandboxError("; ".join(reasons) or "the sandbox needs Linux")


def backend_named(name: str, python: str | None) -> Backend:
    """The backend with that name; "none" means no isolation.

    Raises SandboxError if it is no longer available.
    """
    found = interpreter(python)
    for backend in (no_isolation(found), *available_backends(found)):
        if backend.name == name:
            return backend
    raise SandboxError(f"{name} was available when the run began and is missing now")


def escapes(backend: Backend, limits: Limits) -> str:
    """The forbidden things that a program can do in this sandbox, as a phrase; empty if the sandbox holds.

    Raises SandboxError if no program runs at all.
    """
    with ExitStack() as stack:
        secrets = [stack.enter_context(secret) for secret in _secrets()]
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        outside = ([secret.name for secret in secrets], server.getsockname()[1], os.getpid())
        bounds = (limits.memory_mb, limits.processes, limits.disk_mb)
        call = f"escapes(*{(*outside, *bounds)!r})"
        submission = Submission(PROGRAM, [f"found = {call}\nassert not found, ', '.join(found)"])
        result = run(submission, replace(limits, timeout=PROBE_TIMEOUT), backend)
    if all(result.passed):
        return ""
    if result.error.startswith(FOUND):
        return f"a program in it can {result.error.removeprefix(FOUND)}"
    raise SandboxError(f"the program that tries to escape did not run: {result.error}")


def _secrets() -> Iterator[IO[str]]:
    """A file in the folder for temporary files, and one in the home folder if that is writable."""
    yield tempfile.NamedTemporaryFile("w")  # noqa: SIM115 - the caller enters it
    with suppress(OSError, RuntimeError):  # no home folder
        yield tempfile.NamedTemporaryFile("w", dir=Path.home())  # noqa: SIM115
