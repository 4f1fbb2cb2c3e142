"""sync=shm: weights in safetensors files that trainer and servers map, in shared memory or in a shared folder.

`ShmTransport` and `BucketFile` are the trainer's side, `MappedFiles` is the server's, which `weight_transfer.py` uses.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpocli.errors import EngineError
from grpocli.processes.threads import run_in_thread
from grpocli.rollout.vllm.client import call_all
from grpocli.rollout.vllm.server_files import SHM

if TYPE_CHECKING:
    from grpocli.rollout.vllm.client import ServerClient
    from grpocli.rollout.vllm.weight_sync import ParameterShape, PolicyWeights

WEIGHTS_FOLDER_VARIABLE = "GRPOCLI_SHM_DIR"
"""Names the only folder that a server reads weights from."""
SLOTS = 2  # the trainer writes one file while the servers load the other
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Shapes = Sequence[tuple[str, tuple[int, ...]]]
Files = dict[Path, "BucketFile"]
"""Files by folder; each file has the same bucket."""


class ShmTransport:
    """Writes each bucket while the servers load the one before; servers with a common folder share its files.

    In shared memory two files are made once and rewritten in place, because faulting in new pages costs more than the
    copy. Their names are removed once the servers have mapped them, so nothing can be left behind. On a disk or a
    network file system one machine need not see writes into another's mapping, so there every bucket is a new file.
    """

    collective = False

    def __init__(self, weights: PolicyWeights, bucket_bytes: int) -> None:
        self.weights, self.bucket_bytes = weights, bucket_bytes
        self._slots: list[Files] = []
        self._mapped_plan: list[list[ParameterShape]] = []  # the plan whose slots the servers have mapped

    def send(self, servers: Sequence[ServerClient], stream: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        plan = buckets(self.weights.shapes(), self.weights.dtype, self.bucket_bytes)
        folders = list(dict.fromkeys(Path(server.endpoint.shm_dir) for server in servers))
        if plan != self._mapped_plan or not all(server.prepared for server in servers):
            self.close()
            call_all(servers, lambda server: server.init_transfer({}))
        self._mapped_plan = []
        with ExitStack() as names:  # whatever fails, no file keeps its name
            make = partial(make_files, names, folders, self.weights.dtype)
            if not self._slots and all(in_memory(folder) for folder in folders):
                # before any server begins an update, because there may be no space
                self._slots = [make(plan[slot::SLOTS]) for slot in range(min(SLOTS, len(plan)))]
            call_all(servers, lambda server: server.start_update())
            loading: Future[None] | None = None
            names.callback(lambda: wait([loading] if loading else []))
            for index, shapes in enumerate(plan):
                files = self._slots[index % SLOTS] if self._slots else make([shapes])
                first, *others = files.values()
                first.write(shapes, (tensor for _, tensor in islice(stream, len(shapes))), self.weights.dtype)
                for other in others:
                    other.copy(first)
                for file in [] if self._slots else files.values():
                    file.flush()
                if loading:
                    loading.result()
                loading = run_in_thread(partial(_load, files, servers, bool(self._slots)), "load weights")
            if loading:
                loading.result()
            call_all(servers, lambda server: server.finish_update(version))
        self._mapped_plan = plan

    def close(self) -> None:
        self._slots = []


def buckets(shapes: Shapes, dtype: torch.dtype, size: int) -> list[list[ParameterShape]]:
    """Consecutive parameters whose bytes in `dtype` fill at most `size`; a larger one has a bucket to itself."""
    found: list[list[ParameterShape]] = []
    filled = 0
    for name, shape in shapes:
        bytes_ = math.prod(shape) * dtype.itemsize
        if found and filled + bytes_ <= size:
            found[-1].append((name, shape))
            filled += bytes_
        else:
            found.append([(name, shape)])
            filled = bytes_
    return found


def make_files(
    names: ExitStack, folders: Iterable[Path], dtype: torch.dtype, buckets: Iterable[list[ParameterShape]]
) -> Files:
    """A file in each folder with space for the largest bucket. names: removes its name. Raises EngineError."""
    size, files = max(file_size(shapes, dtype) for shapes in buckets), Files()
    for folder in folders:
        path = folder / f"weights-{secrets.token_hex(8)}.safetensors"
        names.callback(path.unlink, missing_ok=True)
        files[folder] = BucketFile(path, size)
    return files


def in_memory(folder: Path) -> bool:
    """Whether the folder is in this machine's shared memory."""
    return folder.resolve().is_relative_to(SHM)


def _load(files: Files, servers: Sequence[ServerClient], keep: bool) -> None:
    """Have every server load the file in its folder, whose name then goes."""

    def load(server: ServerClient) -> None:
        server.update({"file": files[Path(server.endpoint.shm_dir)].path.name, "keep": keep})

    call_all(servers, load)
    for file in files.values():
        file.path.unlink(missing_ok=True)


class BucketFile:
    """A new file (mode 0600) that the trainer maps once and writes one bucket after another into.

    Its space is reserved first, so a full memory file system raises EngineError here instead of a crash on a write.
    """

    def __init__(self, path: Path, size: int) -> None:
        """size: bytes, header included (`file_size`); a smaller bucket leaves bytes at the end."""
        self.path = path
        private = partial(os.open, mode=0o600)
        with writing_to(path.parent), open(path, "x+b", opener=private) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self._memory = mmap.mmap(file.fileno(), size)

    def write(self, shapes: Shapes, tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        """Cast and copy one bucket, tensor by tensor as they come."""
        head = header(shapes, dtype)
        self._memory[: len(head)] = head
        at = len(head)
        for (_, shape), tensor in zip(shapes, tensors, strict=True):
            count = math.prod(shape)
            if count:
                target = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(shape)
                # a blocking copy from a GPU would cast here, after twice the bytes
                target.copy_(tensor if tensor.is_cpu else tensor.to(dtype))
            at += count * dtype.itemsize

    def flush(self) -> None:
        """Make the bucket visible to other machines."""
        with writing_to(self.path.parent):
            self._memory.flush()

    def copy(self, other: BucketFile) -> None:
        """Copy the bytes of a file of the same size."""
        self._memory[:] = memoryview(other._memory)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """A block whose OSError becomes EngineError, with a way out if there is no space."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; make room there, or give the server another folder with sync=shm sync.folder=" if full else ""
        raise EngineError(f"cannot write weights to {folder}: {error.strerror}{advice}") from error


def file_size(shapes: Shapes, dtype: torch.dtype) -> int:
    """Bytes of a file for this bucket, header included."""
    return len(header(shapes, dtype)) + sum(math.prod(shape) for _, shape in shapes) * dtype.itemsize


def header(shapes: Shapes, dtype: torch.dtype) -> bytes:
    """The header of a safetensors file: its length, then JSON, padded so that the tensors are aligned."""
    entries, at = {}, 0
    for name, shape in shapes:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


class MappedFiles:
    """A server's mappings: it opens a file once by name, and reads it again after the name is removed."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensors(self, name: str, folder: Path, keep: bool) -> list[tuple[str, torch.Tensor]]:
        """Names and views into the file called `name` in `folder`.

        keep: the file stays mapped, because later syncs rewrite it.
        Raises ValueError for anything but a plain file of weights there.
        """
        memory = self._maps.get(name) if isinstance(name, str) else None
        if memory is None:
            path = checked_path(name, folder)
            with path.open("r+b") as file:  # writable, because torch warns about views of read-only memory
                memory = mmap.mmap(file.fileno(), 0)
            if keep:
                self._maps[name] = memory
        return list(_views(memory))

    def forget(self) -> None:
        self._maps.clear()


def _views(memory: mmap.mmap) -> Iterator[tuple[str, torch.Tensor]]:
    start = 8 + int.from_bytes(memory[:8], "little")
    for name, entry in json.loads(memory[8:start]).items():
        dtype, shape, at = DTYPES[entry["dtype"]], entry["shape"], start + entry["data_offsets"][0]
        count = math.prod(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
        yield name, flat.view(shape)


def weights_folder() -> Path:
    """The folder that this server reads weights from."""
    return Path(os.environ[WEIGHTS_FOLDER_VARIABLE]).resolve()


def checked_path(name: str, folder: Path) -> Path:
    """The file called `name` in `folder`. Raises ValueError for a path, a link, or anything but a file."""
    plain = isinstance(name, str) and Path(name).name == name
    if not plain or (folder / name).is_symlink() or not (folder / name).is_file():
        raise ValueError(f"{name!r} is not a file in the folder of the shm transport")
    return folder / name
