"""Disks that fill up, or become read-only, while a run writes: one sentence, and nothing half-written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.kills import lines
from chaos.place import SMALL, Place, is_root, metrics
from chaos.trial import Kind, LeftOut, dealt, demand

PROMISE = "one sentence and exit code 1, and the run goes on from its last checkpoint once there is room"
SIZES_KB = (40, 90, 200, 500, 1000, 2000, 3000, 4500, 6000, 8000, 10_000, 12_000)
"""A run of 4 steps and its checkpoints take 14 MB."""


@dataclass(frozen=True, slots=True)
class Full:
    """size_kb: of the disk that the run is in."""

    size_kb: int
    attacks = 1

    def __str__(self) -> str:
        return f"a disk of {self.size_kb} KB"

    def hold(self, place: Place) -> None:
        with disk(place, self.size_kb) as folder:
            run = folder / "run"
            ended = place.run("train", *SMALL, "checkpoint.keep=9", f"hydra.run.dir={run}")
            demand(ended.code in (1, 2), f"it ended with {ended.code}{ended.tail}")
            said = ended.sentence.lower()
            demand("no space left" in said, f"its sentence does not say that the disk is full: {said}")
            if ended.code == 2:  # before it began
                return
            summary = json.loads((run / "summary.json").read_text())
            demand("no space" in summary["exit"].lower(), f"the summary does not say it: {summary['exit']}")
            subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
            place.run("train", f"resume={run}").check(0)
            demand([row["step"] for row in metrics(run)] == [1, 2, 3, 4], "it did not go on to its end")


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """after: steps, before no checkpoint can be written any more."""

    after: int
    attacks = 1

    def __str__(self) -> str:
        return f"checkpoints that are read-only after step {self.after}"

    def hold(self, place: Place) -> None:
        with disk(place, 64 * 1024) as folder:
            run = folder / "run"
            command = place.start("train", *SMALL, "train.steps=2000", f"hydra.run.dir={run}")
            try:
                command.wait_until(lambda: lines(run) >= self.after)
                over = [*("mount", "-t", "tmpfs", "-o", "ro", "tmpfs"), str(run / "checkpoints")]
                subprocess.run(over, check=True)  # the disk itself is busy: the run has files open
                ended = command.wait()
            finally:
                command.tree.end()
            demand(ended.code == 1, f"it ended with {ended.code}{ended.tail}")
            said = ended.sentence.lower()  # a checkpoint that was being written is hidden by the new file system
            demand("read-only" in said or "no such file" in said, f"its sentence does not say why: {said}")


@contextmanager
def disk(place: Place, size_kb: int) -> Iterator[Path]:
    """A file system in memory of that size. Raises LeftOut where none can be mounted."""
    is_root()
    folder = place.folder / "disk"
    folder.mkdir()
    size = f"size={size_kb}k"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise LeftOut(f"mounting is not allowed: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def draw(random: Random, count: int) -> Sequence[Full | ReadOnly]:
    sizes = [Full(size + random.randrange(40)) for size in dealt(random, SIZES_KB, count - 3)]
    return [*sizes, *(ReadOnly(after) for after in (1, 2, 5))]


KIND = Kind("disks", PROMISE, 14, draw)
