"""Lists and objects that are written as text, as a .csv has them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from contextlib import suppress
from typing import Any

LITERAL = r"""'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?"""
"""A text in quotes. One that is not closed is taken, too, or each of its quotes would be tried as the first."""
NUMPY = re.compile(rf"""({LITERAL}|[}}\]])(\s+(?=['"{{\[]))?|\barray\(|,\s*dtype=\w+\)""", re.DOTALL)
"""A literal or a bracket, with the space that follows instead of a comma; what numpy writes around a list."""


def read_written(value: Any) -> Any:
    """The list or object that a text is in JSON, in Python, or as numpy and pandas print it; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{", "array(")):
        for read in (json.loads, _python):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                if isinstance(found := read(value.strip()), list | dict):
                    return found
    return value


def _python(text: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of an unknown escape, as in '\d'
        return ast.literal_eval(NUMPY.sub(_as_python, text))


def _as_python(found: re.Match[str]) -> str:
    if found[1]:
        return f"{found[1]}, " if found[2] else found[1]
    return "(" if found[0].startswith("array") else ")"
