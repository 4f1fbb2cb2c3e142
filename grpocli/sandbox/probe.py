"""Whether a sandbox holds: a program that tries to get out, before any that a model wrote."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from grpocli.sandbox.backends import Way
from grpocli.sandbox.sandbox import Job, Limits, SandboxError, run

PATIENCE = 60.0
"""Seconds, on a busy machine."""
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


def escapes(way: Way, limits: Limits) -> str:
    """What a program can do that it must not, as a phrase; "" where the sandbox holds.

    Raises SandboxError where nothing can be run at all.
    """
    with ExitStack() as stack:
        secrets = [stack.enter_context(secret) for secret in _secrets()]
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        known = ([secret.name for secret in secrets], server.getsockname()[1], os.getpid())
        bounds = (limits.memory_mb, limits.processes, limits.disk_mb)
        asked = f"escapes(*{(*known, *bounds)!r})"
        job = Job(PROGRAM, [f"found = {asked}\nassert not found, ', '.join(found)"])
        verdict = run(job, replace(limits, timeout=PATIENCE), way)
    if all(verdict.passed):
        return ""
    if verdict.wrong.startswith(FOUND):
        return f"a program in it can {verdict.wrong.removeprefix(FOUND)}"
    raise SandboxError(f"the program that tries it did not run: {verdict.wrong}")


def _secrets() -> Iterator[IO[str]]:
    """A file in the folder for temporary ones, and one in the home folder where that can be written."""
    yield tempfile.NamedTemporaryFile("w")  # noqa: SIM115 - whoever asks enters it
    with suppress(OSError, RuntimeError):  # there may be no home
        yield tempfile.NamedTemporaryFile("w", dir=Path.home())  # noqa: SIM115
