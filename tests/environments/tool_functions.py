"""Functions to call as tools. Worker processes import this file, so it imports nothing that is slow."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


async def later(text: str) -> str:
    """Return a text after a moment.

    Args:
        text: The text.
    """
    await asyncio.sleep(0)
    return text


def echo(text: str, times: int = 1) -> str:
    """Repeat a text.

    Args:
        text: The text.
        times: How often.
    """
    return text * times


def misbehave(how: str) -> str:
    """Fail in a way.

    Args:
        how: The way.
    """
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        raise SystemExit(3)
    if how == "secret":
        return os.environ["SEARCH_KEY"]
    if how == "surrogate":
        return "\ud800"
    if how == "surrogate error":
        raise ValueError("\ud800")
    if how == "random":
        return str(random.random())
    raise RuntimeError(f"cannot {how}")


def undocumented(a: int) -> int:
    return a
