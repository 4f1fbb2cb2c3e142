"""Output of commands: a console for untrusted text (config values, columns, completions), and a pager."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from grpocli.text import clean


class CleanConsole(Console):
    """A console without markup that removes escape sequences from text, but keeps those of its own styles."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print, cleaned."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


@contextmanager
def paged() -> Iterator[Console]:
    """A console whose output goes to $PAGER (`less` if unset) after the block; without a terminal, at once.

    Only `less` gets colours, because other pagers may show escape codes.
    """
    console = CleanConsole()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield console
        return
    os.environ.setdefault("LESS", "-FRX")  # as git does: with colours, and short output stays on the screen
    with console.pager(styles=Path(shlex.split(os.environ.get("PAGER") or "less")[0]).name == "less"):
        yield console
