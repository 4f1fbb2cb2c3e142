"""Weights in safetensors files: written a bucket at a time, cast and copied at once; read from one folder only."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

BUCKET = 512 * 2**20
"""Bytes in one file; a larger parameter has a file of its own. The peak above the model is one bucket."""
FOLDER_VARIABLE = "GRPOCLI_SHM_DIR"
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Named = tuple[str, torch.Tensor]


def buckets(weights: Iterable[Named], dtype: torch.dtype, size: int) -> Iterator[list[Named]]:
    """Consecutive parameters whose bytes in `dtype` fill at most `size`."""
    bucket: list[Named] = []
    filled = 0
    for name, tensor in weights:
        bytes_ = tensor.numel() * dtype.itemsize
        if bucket and filled + bytes_ > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += bytes_
    if bucket:
        yield bucket


def write(path: Path, bucket: list[Named], dtype: torch.dtype) -> int:
    """Write a new safetensors file (mode 0600) with the tensors in `dtype`; return the bytes of its data.

    Space is reserved first: a full memory file system is an OSError here, not a crash on the first write to it.
    """
    header, size = _header(bucket, dtype)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, len(header) + size)
        with mmap.mmap(descriptor, len(header) + size) as memory:
            memory[: len(header)] = header
            _copy(memory, len(header), bucket, dtype)
    finally:
        os.close(descriptor)
    return size


def _header(bucket: list[Named], dtype: torch.dtype) -> tuple[bytes, int]:
    entries, at = {}, 0
    for name, tensor in bucket:
        end = at + tensor.numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def _copy(memory: mmap.mmap, at: int, bucket: list[Named], dtype: torch.dtype) -> None:
    for _, tensor in bucket:
        count = math.prod(tensor.shape)
        if count:
            target = torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(tensor.shape)
            target.copy_(tensor.detach())
            del target  # the map cannot be closed while a tensor looks into it
        at += count * dtype.itemsize


def weights_folder() -> Path:
    """The only folder that a server reads weights from. Raises RuntimeError where its environment names none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise RuntimeError(f"{FOLDER_VARIABLE} is not set: the shm transport has no folder to read from")
    return Path(folder).resolve()


def checked_path(name: str, folder: Path) -> Path:
    """The file called `name` in `folder`. Raises ValueError for anything else: a path, a link, not a file."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in the folder of the shm transport")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{name!r} is not a file in the folder of the shm transport")
    return path
