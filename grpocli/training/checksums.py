"""Checksums of a checkpoint's files, by which a resume detects damage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from grpocli.distributed import sharded_safetensors as shards
from grpocli.progress import Progress, unreported

if TYPE_CHECKING:
    from grpocli.distributed.world import World

INDEX = "checksums.json"
"""{file: [bytes, XXH3 of 128 bits]}"""
THREADS = 4
BLOCK = 1 << 20
GB = 1e9


def write(folder: Path, world: World) -> None:
    """Write the checksums of all files below `folder`. Collective.

    Each process reads the files that it wrote, which are still in its machine's page cache.
    """
    world.barrier()
    names = world.broadcast_object(_names(folder))
    mine = [name for name in names if shards.writer(name, world.size) == world.rank]
    checksums = dict(world.gather_objects([(name, _checksum(folder / name)) for name in mine]))
    if world.is_main:
        (folder / INDEX).write_text(json.dumps({name: checksums[name] for name in names}, indent=2))


def check(folder: Path, progress: Progress = unreported) -> None:
    """Raise ValueError, with the name of a file, unless `folder` holds exactly the files that were written.

    progress: called with the gigabytes read.
    """
    expected = json.loads((folder / INDEX).read_text())
    if not isinstance(expected, dict):
        raise ValueError(f"{INDEX} is damaged")
    names = _names(folder)
    if differing := sorted(expected.keys() ^ names):
        name = differing[0]
        raise ValueError(f"{name} is missing" if name in expected else f"{name} does not belong to the checkpoint")
    total = sum((folder / name).stat().st_size for name in names)
    done, counting = 0, threading.Lock()

    def count(read: int) -> None:
        nonlocal done
        with counting:
            done += read
            progress(done / GB, total / GB, "GB")

    with ThreadPoolExecutor(THREADS) as pool:
        checksums = pool.map(lambda name: _checksum(folder / name, count), names)
        for name, checksum in zip(names, checksums, strict=True):
            if checksum != expected[name]:
                pool.shutdown(wait=False, cancel_futures=True)  # the others need not be read
                raise ValueError(f"{name} differs from what was written")


def _names(folder: Path) -> list[str]:
    """Paths of the files below `folder`, without hidden ones, which file systems create."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path != folder / INDEX
    )


def _checksum(path: Path, count: Callable[[int], None] = lambda _: None) -> list[int | str]:
    """Size and digest of a file. count: called with the length of each block read."""
    size, digest = 0, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
            count(len(block))
    return [size, digest.hexdigest()]
