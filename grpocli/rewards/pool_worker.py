"""A worker process of `Pool`: JSON items in, JSON results out, gone when its parent is."""

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

MAX_BYTES = 4 * 2**30
READY = "ready"


def main() -> None:
    """Serve `module:function` until the input ends."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which finishes its step and then ends us
    _limit_memory()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        module, _, name = sys.argv[1].partition(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent says it
        print(json.dumps([None, f"{type(error).__name__}: {error}"]), file=out, flush=True)
        return
    print(json.dumps(READY), file=out, flush=True)
    _serve(function, out)


def _limit_memory() -> None:
    """A power tower written by a model may ask for all of the machine's memory before its time is up."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _serve(function: Callable[..., Any], out: TextIO) -> None:
    process = os.getpid()
    for line in sys.stdin:
        try:
            answer = json.dumps([function(*json.loads(line))])
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent counts it
            answer = json.dumps([None, str(error) or type(error).__name__])
        if os.getpid() != process:  # forked by the function: it must not become a second worker
            os._exit(70)
        print(answer, file=out, flush=True)


if __name__ == "__main__":
    main()
