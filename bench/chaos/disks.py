"""Disks that fill up or become read-only while a run writes: one error, and no half-written file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.kills import lines
from chaos.trial import Kind, Skipped, require, spread
from chaos.workspace import SMALL, Workspace, metrics, require_root

SIZES_KB = (40, 90, 200, 500, 1000, 2000, 3000, 4500, 6000, 8000, 10_000, 12_000)
"""A run of 4 steps and its checkpoints take 14 MB."""


@dataclass(frozen=True, slots=True)
class Full:
    """A run on a disk of `size_kb`."""

    size_kb: int
    attacks = 1

    def __str__(self) -> str:
        return f"a disk of {self.size_kb} KB"

    def execute(self, workspace: Workspace) -> None:
        with disk(workspace, self.size_kb) as folder:
            run = folder / "run"
            ended = workspace.run("train", *SMALL, "checkpoint.keep=9", f"hydra.run.dir={run}")
            require(ended.code in (1, 2), f"it ended with {ended.code}{ended.tail}")
            said = ended.sentence.lower()
            require("no space left" in said, f"the error does not say that the disk is full: {said}")
            if ended.code == 2:
                return
            summary = json.loads((run / "summary.json").read_text())
            require("no space" in summary["exit"].lower(), f"the summary does not say so: {summary['exit']}")
            subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
            workspace.run("train", f"resume={run}").check(0)
            require([row["step"] for row in metrics(run)] == [1, 2, 3, 4], "the resumed run is not complete")


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """The checkpoint folder becomes read-only after step `after`."""

    after: int
    attacks = 1

    def __str__(self) -> str:
        return f"checkpoints that are read-only after step {self.after}"

    def execute(self, workspace: Workspace) -> None:
        with disk(workspace, 64 * 1024) as folder:
            run = folder / "run"
            command = workspace.start("train", *SMALL, "train.steps=2000", f"hydra.run.dir={run}")
            try:
                command.wait_until(lambda: lines(run) >= self.after)
                over = [*("mount", "-t", "tmpfs", "-o", "ro", "tmpfs"), str(run / "checkpoints")]
                subprocess.run(over, check=True)  # the disk itself is busy: the run has files open
                ended = command.wait()
            finally:
                command.tree.end()
            require(ended.code == 1, f"it ended with {ended.code}{ended.tail}")
            said = ended.sentence.lower()  # a checkpoint that was being written is hidden by the new file system
            require("read-only" in said or "no such file" in said, f"the error does not say why: {said}")


@contextmanager
def disk(workspace: Workspace, size_kb: int) -> Iterator[Path]:
    """A file system in memory of this size. Raises Skipped if it cannot be mounted."""
    require_root()
    folder = workspace.folder / "disk"
    folder.mkdir()
    size = f"size={size_kb}k"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Skipped(f"mounting is not allowed: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def draw(random: Random, count: int) -> Sequence[Full | ReadOnly]:
    sizes = [Full(size + random.randrange(40)) for size in spread(random, SIZES_KB, count - 3)]
    return [*sizes, *(ReadOnly(after) for after in (1, 2, 5))]


KIND = Kind("disks", 14, draw)
