"""The user's own lines in the traceback of an error."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

from grpocli.errors import GrpoError
from grpocli.version import PACKAGE

LONGEST = 120
"""Characters of a line of code."""
INSTALLED = ("site-packages", "dist-packages")
OTHERS = (PACKAGE, PACKAGE.parent / "hydra_plugins" / "grpocli_slurm", Path(sysconfig.get_path("stdlib")))
"""Folders of code that is not the user's: grpocli, in a clone its plugin of Hydra's, and Python."""


def raised(error: BaseException) -> str:
    """`IndexError: list index out of range (rewards.py:12, in score: return x[0])`, on one line.

    With GRPOCLI_TRACEBACK the whole traceback follows. It is part of the text so that it comes through worker
    processes, which send text alone.
    """
    name, message = type(error).__name__, _message(error)
    return f"{name}: {message}{where(error)}" if message else f"{name}{where(error)}"


def where(error: BaseException) -> str:
    """` (rewards.py:12, in score: return x[0])`, or an empty string without a frame of the user's code.

    Two frames at most: the last one, and the one that called it.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        frames = [f"{_short(error.filename)}:{error.lineno}: {_cut(error.text or '')}"]
    else:
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        # of a function and a comprehension on the same line, the function
        lines = {(f.filename, f.lineno): f for f in reversed(stack)}
        frames = [f"{_short(f.filename)}:{f.lineno}, in {f.name}: {_cut(f.line or '')}" for f in lines.values()]
    if not frames:
        return ""
    place = f" ({'; called at '.join(frames[:2])})"
    if os.environ.get("GRPOCLI_TRACEBACK"):
        place += "\n" + "".join(traceback.format_exception(error))
    return place


def from_user_code(error: BaseException | None) -> bool:
    """Whether the user's code raised an error, or one that caused it: the message then says where.

    What the user's code says itself with a GrpoError is a sentence already.
    """
    while error is not None:
        if not isinstance(error, GrpoError) and where(error):
            return True
        error = error.__cause__
    return False


def _message(error: BaseException) -> str:
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception as another:  # noqa: BLE001 - the user's `__str__` is the user's code, too
        return f"its __str__ raises {type(another).__name__}"
    return " ".join(text.split())


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or any(part in INSTALLED for part in Path(filename).parts):
        return False
    return not any(Path(filename).is_relative_to(folder) for folder in OTHERS)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _cut(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= LONGEST else line[:LONGEST] + "..."
