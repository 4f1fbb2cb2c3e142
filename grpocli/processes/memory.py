"""Too little memory: which errors say so, and whether this process may have what the libraries take."""

from __future__ import annotations

import errno
import re
import resource

from grpocli.errors import RunError
from grpocli.user_frames import where

SAYS = re.compile(
    r"out of memory|can(?:no|')t allocate|failed to map segment|malloc of size|bad_alloc|start (?:new|watchdog) thread",
    re.IGNORECASE,
)
LEAST = 1.25e9
"""Bytes of address space below which OpenBLAS waits for ever while it is loaded."""


def check_limit() -> None:
    """Raise RunError if the libraries would not fit into the limit of this process."""
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < LEAST:
        raise RunError(f"too little memory to load the libraries; {_advice()}")


def too_little(error: BaseException | None) -> RunError | None:
    """The RunError for an error that has too little memory among its causes; None for user code's and any other."""
    while error is not None and not where(error):
        name, text = type(error).__name__, " ".join(str(error).split())[:300]
        told = isinstance(error, ImportError | RuntimeError) and SAYS.search(text)  # torch's errors are RuntimeErrors
        if told or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            gpu = "lower train.micro_batch_tokens, and see `grpocli plan`" if "OutOfMemory" in name else ""
            return RunError(f"too little memory: {name}: {text}".rstrip(": .") + f"; {gpu or _advice()}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _advice() -> str:
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]  # -1 without a limit
    return "free some, or see `grpocli plan`" if allowed < 0 else f"`ulimit -v` allows {allowed / 1e9:.2f} GB: raise it"
