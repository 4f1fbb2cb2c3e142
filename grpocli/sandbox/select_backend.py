"""Which way of shutting programs in is taken: the first that holds when it is tried."""

from __future__ import annotations

from grpocli.sandbox.backends import Way, python_of, unsafe, ways
from grpocli.sandbox.probe import escapes
from grpocli.sandbox.sandbox import Limits, SandboxError


def best(python: str | None, limits: Limits) -> str:
    """The name of a way for `way_of`.

    Raises SandboxError where none holds, OSError or subprocess.SubprocessError where `python` does not start.
    """
    reasons = []
    for way in ways(python_of(python)):
        try:
            reason = escapes(way, limits)
        except SandboxError as error:
            reason = str(error)
        if not reason:
            return way.name
        reasons.append(f"{way.name}: {reason}")
    raise SandboxError("; ".join(reasons) or "only Linux has what it takes")


def way_of(name: str, python: str | None) -> Way:
    """The way of that name, or `none`. Raises SandboxError where it is gone."""
    found = python_of(python)
    if name == "none":
        return unsafe(found)
    for way in ways(found):
        if way.name == name:
            return way
    raise SandboxError(f"{name} was here when the run began, and is not now")
