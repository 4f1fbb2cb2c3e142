"""Whether a sandbox holds: a program that tries to get out, before any that a model wrote."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from grpocli.sandbox.sandbox import Job, Limits, run
from grpocli.sandbox.ways import Way

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

def crowded(home):
    if len(os.listdir(home)) < 2:
        raise OSError

def escapes(secret, home, port, pid, memory_mb, processes, disk_mb):
    files = [f"/tmp/.escaped-{pid}-{i}" for i in range(disk_mb + 1)]
    return [
        *tried("read the passwords", lambda: open("/etc/shadow").read()),
        *tried("read a temporary file of the machine's", lambda: open(secret).read()),
        *tried("see what is in the home folder", lambda: crowded(home)),
        *tried("write into the home folder", lambda: write(home + "/.escaped")),
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
    with tempfile.NamedTemporaryFile("w") as secret, socket.create_server(("127.0.0.1", 0)) as server:
        secret.write("secret")
        secret.flush()
        home = str(Path("~").expanduser())
        known = (secret.name, home, server.getsockname()[1], os.getpid())
        bounds = (limits.memory_mb, limits.processes, limits.disk_mb)
        asked = f"escapes(*{(*known, *bounds)!r})"
        verdict = run(Job(PROGRAM, [f"found = {asked}\nassert not found, ', '.join(found)"]), limits, way)
    if all(verdict.passed):
        return ""
    return f"a program in it can {verdict.wrong.removeprefix('AssertionError: ')}"
