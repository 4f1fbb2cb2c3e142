"""Buckets of weights as safetensors files, written and read through mappings; a server reads from one folder only."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from grpocli.errors import EngineError

FOLDER_VARIABLE = "GRPOCLI_SHM_DIR"
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Named = tuple[str, torch.Tensor]
Shapes = Sequence[tuple[str, tuple[int, ...]]]


def bucket_counts(shapes: Shapes, dtype: torch.dtype, size: int) -> list[int]:
    """How many consecutive parameters go into each bucket, so that their bytes in `dtype` fill at most `size`.

    A larger parameter has a bucket of its own.
    """
    counts: list[int] = []
    filled = 0
    for _, shape in shapes:
        bytes_ = math.prod(shape) * dtype.itemsize
        if counts and filled + bytes_ <= size:
            counts[-1] += 1
            filled += bytes_
        else:
            counts.append(1)
            filled = bytes_
    return counts


class BucketFile:
    """A new file (mode 0600) for one bucket after another, mapped once: pages are faulted in once.

    Space is reserved first: a full memory file system is an EngineError here, not a crash on the first write to it.
    """

    def __init__(self, path: Path, size: int) -> None:
        """size: bytes, header included (`file_size`); a smaller bucket leaves bytes at the end."""
        self.path, self.size = path, size
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
                self._memory = mmap.mmap(descriptor, size)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(path.parent, error) from error

    def write(self, shapes: Shapes, tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        """Cast and copy one bucket, tensor by tensor as they come."""
        head = header(shapes, dtype)
        self._memory[: len(head)] = head
        at = len(head)
        for (_, shape), tensor in zip(shapes, tensors, strict=True):
            count = math.prod(shape)
            if count:
                target = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(shape)
                target.copy_(tensor)
            at += count * dtype.itemsize

    def flush(self) -> None:
        """Bring what was written to where other machines see it."""
        try:
            self._memory.flush()
        except OSError as error:
            raise _cannot_write(self.path.parent, error) from error

    def copy(self, other: BucketFile) -> None:
        """Take over the bytes of a file of the same size."""
        self._memory[:] = memoryview(other._memory)

    def unlink(self) -> None:
        """Take its name away; who has mapped it keeps it."""
        self.path.unlink(missing_ok=True)


def _cannot_write(folder: Path, error: OSError) -> EngineError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return EngineError(
        f"cannot write weights to {folder}: {error.strerror}"
        + ("; make room there, or give the server another folder with sync=shm sync.folder=" if full else "")
    )


def file_size(shapes: Shapes, dtype: torch.dtype) -> int:
    """Bytes of a file for this bucket, its header included."""
    return len(header(shapes, dtype)) + sum(math.prod(shape) for _, shape in shapes) * dtype.itemsize


def header(shapes: Shapes, dtype: torch.dtype) -> bytes:
    """Of a safetensors file: its length, then JSON, padded so that the tensors are aligned."""
    entries, at = {}, 0
    for name, shape in shapes:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


class MappedFiles:
    """A server's mappings: a file is opened once by its name, and read again without its name in the folder."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensors(self, name: str, folder: Path, keep: bool) -> list[Named]:
        """Views into the file called `name` in `folder`; keep: it will be written again.

        Raises ValueError for what is not a plain file there, or not one of weights.
        """
        memory = self._maps.get(name) if isinstance(name, str) else None
        if memory is None:
            path = checked_path(name, folder)
            with path.open("r+b") as file:  # writable: torch warns of tensors that look into read-only memory
                memory = mmap.mmap(file.fileno(), 0)
            if keep:
                self._maps[name] = memory
        return list(_views(memory))

    def forget(self) -> None:
        self._maps.clear()


def _views(memory: mmap.mmap) -> Iterator[Named]:
    start = 8 + int.from_bytes(memory[:8], "little")
    if start > len(memory):
        raise ValueError("a file of weights is cut off in its header")
    for name, entry in json.loads(memory[8:start]).items():
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        count = math.prod(shape)
        if begin < 0 or end - begin != count * dtype.itemsize or start + end > len(memory):
            raise ValueError(f"a file of weights is cut off in {name!r}")
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=start + begin)
            if count
            else torch.empty(0, dtype=dtype)
        )
        yield name, flat.view(shape)


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
