"""What an error is about: the lines of user code in its traceback, or too little memory."""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from pathlib import Path

from grpocli.errors import GrpoError, RunError
from grpocli.plugins import plugins
from grpocli.version import PACKAGE

LONGEST = 120
"""The longest line of code that is shown, in characters."""
INSTALLED = ("site-packages", "dist-packages")
OTHERS = (PACKAGE, PACKAGE.parent / "hydra_plugins" / "grpocli_slurm", Path(sysconfig.get_path("stdlib")))
"""Folders of code that is not the user's, beside those of commands: grpocli, its Hydra plugin in a clone, Python."""

SAYS_MEMORY = re.compile(
    r"out of memory|can(?:no|')t allocate|failed to map segment|malloc of size|bad_alloc|start (?:new|watchdog) thread",
    re.IGNORECASE,
)
"""Messages of libraries about too little memory."""


def raised(error: BaseException) -> str:
    """`IndexError: list index out of range (rewards.py:12, in score: return x[0])`, on one line.

    With GRPOCLI_TRACEBACK=1 the traceback follows. It is part of the text because worker processes send only text.
    """
    name = type(error).__name__
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{name}: {message}{where(error)}" if message else f"{name}{where(error)}"


def where(error: BaseException) -> str:
    """` (rewards.py:12, in score: return x[0])`; empty without a frame of user code.

    It has at most two frames: the last one and its caller.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        frames = [f"{_short(error.filename)}:{error.lineno}: {_cut(error.text or '')}"]
    else:
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        # a function and a comprehension on the same line: keep the function
        lines = {(f.filename, f.lineno): f for f in reversed(stack)}
        frames = [f"{_short(f.filename)}:{f.lineno}, in {f.name}: {_cut(f.line or '')}" for f in lines.values()]
    if not frames:
        return ""
    place = f" ({'; called at '.join(frames[:2])})"
    if os.environ.get("GRPOCLI_TRACEBACK"):
        place += "\n" + "".join(traceback.format_exception(error))
    return place


def from_user_code(error: BaseException | None) -> bool:
    """Whether user code raised an error or one of its causes, so that the message names the line.

    A GrpoError of user code does not count: it is a sentence for the user already.
    """
    while error is not None:
        if not isinstance(error, GrpoError) and where(error):
            return True
        error = error.__cause__
    return False


def too_little_memory(error: BaseException | None) -> RunError | None:
    """The RunError for an error that has too little memory among its causes; None for user code's and any other."""
    while error is not None and not where(error):
        name, text = type(error).__name__, " ".join(str(error).split())[:300]
        told = isinstance(error, ImportError | RuntimeError) and SAYS_MEMORY.search(text)  # torch raises RuntimeErrors
        if told or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            advice = "lower train.micro_batch_tokens, and" if "OutOfMemory" in name else "free some, or"
            return RunError(f"too little memory: {name}: {text}".rstrip(": .") + f"; {advice} see `grpocli plan`")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or any(part in INSTALLED for part in Path(filename).parts):
        return False
    tools = {PACKAGE.parent / plugin.module.partition(".")[0] for plugin in plugins("grpocli.commands").values()}
    return not any(Path(filename).is_relative_to(folder) for folder in (*OTHERS, *tools))


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _cut(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= LONGEST else line[:LONGEST] + "..."
