"""Selects the first backend that holds against a program that tries to escape."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from grpocli.sandbox.backends import Backend, available_backends, interpreter, no_isolation
from grpocli.sandbox.sandbox import Limits, SandboxError, Submission, run

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
    if name == "none":
        return no_isolation(found)
    for backend in available_backends(found):
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
