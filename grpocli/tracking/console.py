"""A console for untrusted text: config keys and values, columns, completions."""

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

from grpocli.tracking.text import clean


class CleanConsole(Console):
    """No markup; escape sequences in printed text are removed, those of the console's own styles stay."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed, cleaned."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


DEFAULT = "less"


def pager_of(env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command of $PAGER, `less` if there is none, and the environment to start it in; empty for no pager.

    `less` shows colours with -R alone, whatever $LESS says besides. Without $LESS it also leaves short output on the
    screen, as git's does, and takes text for UTF-8.
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
    """A console whose output a pager shows as it comes; the terminal's own where there is no pager or no terminal.

    Only `less` is given colours: another pager might show their escape codes. The block ends when the user leaves the
    pager, or with Ctrl-C, after which the pager still shows what there is.
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
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on Ctrl-C is the pager's
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        signal.signal(signal.SIGINT, before)
