"""Output of commands: a console for untrusted text (config values, columns, completions), and a pager."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

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


DEFAULT = "less"


def pager_of(env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command of $PAGER (`less` if unset) and its environment; empty if there is no pager.

    `less` gets -R for colours. If $LESS is unset, it also leaves short output on the screen, as git does, and reads
    UTF-8.
    """
    try:
        command = shlex.split(env.get("PAGER", DEFAULT))
    except ValueError:
        return [], {}
    if not command or env.get("TERM", "dumb") == "dumb":
        return [], {}
    if not is_less(command):
        return command, dict(env)
    short = [] if "LESS" in env else ["-F", "-X"]
    return [*command, "-R", *short], {"LESSCHARSET": "utf-8", **env}


def is_less(command: list[str]) -> bool:
    return Path(command[0]).name == "less"


@contextmanager
def paged() -> Iterator[Console]:
    """A console whose output goes to a pager; the terminal's own console without a pager or a terminal.

    Only `less` gets colours, because other pagers may show escape codes. The block ends when the user quits the pager,
    or at Ctrl-C, after which the pager still shows the output so far.
    """
    plain = CleanConsole()
    command, env = pager_of(os.environ)
    if not (sys.stdin.isatty() and sys.stdout.isatty() and command and shutil.which(command[0])):
        yield plain
        return

    class Paged(CleanConsole):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process

    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, text=True, encoding="utf-8", errors="replace")
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError, KeyboardInterrupt):
            colours: Literal["auto"] | None = "auto" if is_less(command) else None
            yield Paged(file=process.stdin, force_terminal=True, color_system=colours, width=plain.width)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on Ctrl-C is for the pager
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        signal.signal(signal.SIGINT, before)
