"""A disk that is really full, where the machine lets us make one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no right to mount a small file system here: {error}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def exhaust(things: Iterator[object]) -> None:
    for _ in things:
        pass


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """The same, with nothing left on it."""
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        exhaust(file.write(b"x" * 65536) for _ in range(1000))
    return small_disk
