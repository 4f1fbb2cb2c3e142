"""A worker process of `WorkerPool`: reads items and writes results, as JSON lines, until its parent ends."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from grpocli.processes.reaper import die_with_parent
from grpocli.processes.signals import handle_stops

MOST_MEMORY = 4 * 2**30
"""Bytes of address space."""
READY = "ready"
FORKED = 70
"""Exit code of a process that the function has forked and that returned from it."""


def main() -> None:
    """Serve `module:function` until the input ends."""
    die_with_parent()
    handle_stops(signal.SIG_IGN)  # the run finishes its step and then ends its workers
    _limit_memory()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output must not mix with the results
    try:
        module, _, name = sys.argv[1].partition(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        print(json.dumps([None, f"{type(error).__name__}: {error}"]), file=out, flush=True)
        return
    print(json.dumps(READY), file=out, flush=True)
    _serve(function, out)


def _limit_memory() -> None:
    """Bound the address space: a power tower in a completion can request all of the machine's memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _serve(function: Callable[..., Any], out: TextIO) -> None:
    process = os.getpid()
    for line in sys.stdin:
        try:
            message = json.dumps([function(*json.loads(line))])
        except Exception as error:  # noqa: BLE001 - the parent counts it
            message = json.dumps([None, str(error) or type(error).__name__])
        if os.getpid() != process:  # a process that the function forked must not serve items
            os._exit(FORKED)
        print(message, file=out, flush=True)


if __name__ == "__main__":
    main()
