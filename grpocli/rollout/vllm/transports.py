"""The trainer's transports of weights, and the server's side of shm that needs no vLLM.

sync=shm: safetensors files that trainer and servers map, in shared memory or in a shared folder. `MappedFiles` is the
server's side, which `weight_transfer.py` uses.

sync=nccl and sync=ipc: vLLM's own trainer engines, which call our servers through `TransferClient`. sync=ipc has run on
one H100, sync=nccl on no GPU yet. CUDA IPC handles travel as JSON instead of a pickle.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import EngineError
from grpocli.processes.threads import run_in_thread
from grpocli.rollout.vllm.client import call_all
from grpocli.rollout.vllm.server_files import POLL, SHM

if TYPE_CHECKING:
    from grpocli.rollout.vllm.client import ServerClient
    from grpocli.rollout.vllm.weight_sync import ParameterShape, PolicyWeights

WEIGHTS_FOLDER_VARIABLE = "GRPOCLI_SHM_DIR"
"""Names the only folder that a server reads weights from."""
SLOTS = 2  # the trainer writes one file while the servers load the other
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Shapes = Sequence[tuple[str, tuple[int, ...]]]
Stream = Iterator[tuple[str, torch.Tensor]]
Files = dict[Path, "BucketFile"]
"""Files by folder; each file has the same bucket."""


class ShmTransport:
    """Writes each bucket while the servers load the one before; servers with a common folder share its files.

    In shared memory two files are rewritten in place, because new pages cost more than the copy; their names go once
    they are mapped. Elsewhere one machine need not see writes into another's mapping, so every bucket is a new file.
    """

    collective = False

    def __init__(self, weights: PolicyWeights, bucket_bytes: int) -> None:
        self.weights, self.bucket_bytes = weights, bucket_bytes
        self._slots: list[Files] = []
        self._mapped_plan: list[list[ParameterShape]] = []  # the plan whose slots the servers have mapped

    def send(self, servers: Sequence[ServerClient], stream: Stream, version: int) -> None:
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
    """A new file (mode 0600) of `size` bytes that the trainer maps once and writes one bucket after another into.

    Its space is reserved first, so a full memory file system raises EngineError here instead of a crash on a write.
    """

    def __init__(self, path: Path, size: int) -> None:
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
        """Names and views into the file called `name` in `folder`. keep: later syncs rewrite it, so it stays mapped.

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


def checked_path(name: str, folder: Path) -> Path:
    """The file called `name` in `folder`. Raises ValueError for a path, a link, or anything but a file."""
    plain = isinstance(name, str) and Path(name).name == name
    if not plain or (folder / name).is_symlink() or not (folder / name).is_file():
        raise ValueError(f"{name!r} is not a file in the folder of the shm transport")
    return folder / name


# GPUs

DEADLINE = 600.0  # seconds for one transfer, since NCCL itself has no deadline


def import_engines() -> None:
    """Import vLLM's trainer engines, which takes 5 to 10 s, before the first sync needs them."""
    # first, because vLLM sets the environment to one thread for torch's compiler
    import torch._inductor.config  # noqa: F401
    import vllm.distributed.weight_transfer.ipc_engine
    import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401


class Metadata(list[Any]):
    """A list that vLLM 0.33 reads as `source.metadata`, and 0.32 as `source.metadata()`."""

    def __call__(self) -> Metadata:
        return self


class WeightSource:
    """vLLM's `WeightSource` over the stream of one sync, cast to the server's dtype; every rank has all weights.

    vLLM 0.32 iterates it, 0.33 `iter_full()`.
    """

    def __init__(self, weights: PolicyWeights) -> None:
        self.weights = weights
        self.stream: Stream = iter(())

    @property
    def metadata(self) -> Metadata:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return Metadata(ParamMeta(name, self.weights.dtype, shape) for name, shape in self.weights.shapes())

    def owned_names(self, rank: int) -> list[str]:
        return [name for name, _ in self.weights.shapes()]

    def implements_iter_full(self) -> bool:
        return True

    def iter_full(self) -> Stream:
        for name, tensor in self.stream:
            yield name, tensor.to(self.weights.dtype)

    __iter__ = iter_full


class TransferClient:
    """vLLM's `VLLMWeightSyncClient` over all servers at once.

    After a failure later calls do nothing, so that this process finishes the collective work of the transfer in step
    with the others; then `check` raises.
    """

    def __init__(self) -> None:
        self.servers: Sequence[ServerClient] = ()
        self.version = 0
        self.failure: EngineError | None = None

    def begin(self, servers: Sequence[ServerClient], version: int) -> None:
        self.servers, self.version, self.failure = servers, version, None

    def check(self) -> None:
        if self.failure:
            raise self.failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make one group of the workers of all servers, with ranks in the order of the servers."""
        offset, sizes = init_info.get("rank_offset"), dict[int, int]()
        self._each(lambda server: sizes.update({id(server): server.world_size()}))

        def init(server: ServerClient) -> None:
            before = self.servers[: self.servers.index(server)]
            own = {} if offset is None else {"rank_offset": offset + sum(sizes[id(one)] for one in before)}
            server.init_transfer({**init_info, **own})

        self._each(init)

    def start_weight_update(self) -> None:
        self._each(lambda server: server.start_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if update_info.get("ipc_handles") is not None:
            update_info = {**update_info, "ipc_handles": encode_handles(update_info["ipc_handles"])}
        info = {name: value for name, value in update_info.items() if value is not None}
        self._each(lambda server: server.update(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(lambda server: server.finish_update(self.version))

    def _each(self, call: Callable[[ServerClient], None]) -> None:
        if not self.failure:
            try:
                call_all(self.servers, call)
            except EngineError as error:
                self.failure = error


def packing(bucket_bytes: int) -> dict[str, Any]:
    """vLLM's settings for packed tensors on both sides. With several buffers its loader may read one being refilled."""
    return {"packed": True, "packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": 1}


class GpuTransport:
    """What both transports hold: vLLM's view of the weights and of the servers, and vLLM's engine once it is made."""

    def __init__(self, weights: PolicyWeights, bucket_bytes: int) -> None:
        self.weights, self.bucket_bytes = weights, bucket_bytes
        self.source, self.client = WeightSource(weights), TransferClient()
        self._engine: Any = None

    def _send_weights(self) -> None:
        """To be called within a deadline: it waits for every kernel, also for one that an earlier transfer left."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # since a transfer reads the weights in another stream, which waits for nothing
        self._engine.send_weights()
        self.client.check()


class NcclTransport(GpuTransport):
    """Broadcasts from the main process's GPU to every GPU of the servers, in packed buckets.

    The group's id goes over the authenticated HTTP connection. vLLM's own rendezvous store has no password and
    unpickles its content, so it is not opened.
    """

    collective = False

    def send(self, servers: Sequence[ServerClient], stream: Stream, version: int) -> None:
        self.client.begin(servers, version)
        self.source.stream = stream
        if self._engine is None or not all(server.prepared for server in servers):
            self.close()
            in_thread(
                DEADLINE, "the servers to join the trainer's NCCL group (sync=nccl)", self._join, self.client.check
            )
        try:
            in_thread(DEADLINE, "the weights to be broadcast (sync=nccl)", self._send_weights, self.client.check)
        except EngineError:
            self.close()  # abort the broadcast, which would block the GPU and any call that frees its memory
            raise

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _join(self) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        packed = packing(self.bucket_bytes)
        size = 1 + sum(server.world_size() for server in self.client.servers)
        uid = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        info = {"rank_offset": 1, "world_size": size, "nccl_unique_id_b64": base64.b64encode(uid).decode(), **packed}
        engine = NCCLTrainerWeightTransferEngine(client=self.client, source=self.source, **packed)
        # the servers answer once the trainer has joined too
        joined = run_in_thread(partial(self.client.init_weight_transfer_engine, info), "join the servers' group")
        engine.model_update_group = uid_init_process_group(uid, 0, size, torch.accelerator.current_device_index())
        joined.result()
        self.client.check()
        self._engine = engine


class IpcTransport(GpuTransport):
    """Shares CUDA memory, a packed bucket at a time; a server's worker reads it from the process on its own GPU.

    So every process sends: the handles are gathered, and the main process passes them to the servers.
    """

    collective = True

    def __init__(self, weights: PolicyWeights, bucket_bytes: int, rank: int) -> None:
        super().__init__(weights, bucket_bytes)
        self.rank = rank
        self._exported: tuple[Any, ...] | None = None  # the bucket, as this process's GPU shares it

    def send(self, servers: Sequence[ServerClient], stream: Stream, version: int) -> None:
        self.client.begin(servers, version)
        self.source.stream = stream
        if self._engine is None:
            self._engine = self._make()
        elif not all(server.prepared for server in servers):
            self.client.init_weight_transfer_engine({"packed": True})
        in_thread(DEADLINE, "the weights to be handed over (sync=ipc)", self._send_weights)

    def close(self) -> None:
        self._engine = None
        if self._exported:
            release(self._exported)
        self._exported = None

    def _make(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        itemsize = self.weights.dtype.itemsize
        largest = max(torch.Size(shape).numel() for _, shape in self.weights.shapes()) * itemsize
        info = IPCTrainerInitInfo(rank=self.rank, packed=True, packed_buffer_size_bytes=max(self.bucket_bytes, largest))
        engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=self.source)
        gather = engine._all_gather_and_merge_handles

        def gather_handles(handles: list[Handles]) -> list[Handles]:
            (self._exported,) = handles[0].values()
            return gather(handles)  # type: ignore[no-any-return]

        engine._all_gather_and_merge_handles = gather_handles
        return engine


def in_thread(seconds: float, what: str, call: Callable[[], None], check: Callable[[], None] = lambda: None) -> None:
    """Run `call` in a thread on the same device, and wait for it.

    check: called while waiting; raises if the wait has become pointless.
    Raises EngineError if `call` raises, or after `seconds`.
    """
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        call()

    future = run_in_thread(run, "weights")
    deadline = time.monotonic() + seconds
    while not wait([future], POLL).done:
        check()
        if time.monotonic() > deadline:
            raise EngineError(f"waited {seconds:g} s for {what}")
    if error := future.exception():
        raise error if isinstance(error, EngineError) else EngineError(f"{what}: {error}") from error


NAMED: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "UntypedStorage": torch.UntypedStorage,
    "TypedStorage": torch.storage.TypedStorage,
    "uint8": torch.uint8,
}
"""The types and the dtype of a packed bucket."""
ARGUMENTS = 15
"""tensor type, size, stride, offset, storage type, dtype, device, handle, storage size and offset, requires_grad, then
the reference counter's handle and offset, the event's handle, and whether to wait for it."""

Handles = dict[str, tuple[Any, ...]]


def release(arguments: tuple[Any, ...]) -> None:
    """Free an exported bucket whose reader has died: torch would wait for the reader's release for ever.

    One that its reader has released is free already; torch uses its counter for nothing else.
    """
    torch.UntypedStorage._release_ipc_counter(*arguments[11:13], device=arguments[6])
    torch.cuda.ipc_collect()


def encode_handles(handles: Handles) -> dict[str, list[Any]]:
    """The arguments for each GPU (by its UUID) in JSON's types."""
    return {uuid: [_encode(argument) for argument in arguments] for uuid, arguments in handles.items()}


def decode_handles(handles: Any) -> Handles:
    """The inverse of `encode_handles`. Raises ValueError for any other input."""
    if not isinstance(handles, dict):
        raise ValueError("IPC handles come as one object for each GPU")
    decoded = {str(uuid): tuple(_decode(argument) for argument in arguments) for uuid, arguments in handles.items()}
    if any(len(arguments) != ARGUMENTS for arguments in decoded.values()):
        raise ValueError(f"an IPC handle has {ARGUMENTS} parts")
    return decoded


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):  # torch.Size too
        return {"ints": list(value)}
    return next(({"name": name} for name, known in NAMED.items() if known is value), value)


def _decode(value: Any) -> Any:
    match value:
        case None | bool() | int():
            return value
        case {"bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case {"ints": list(items)} if all(type(item) is int for item in items):
            return tuple(items)
        case {"name": str(name)} if name in NAMED:
            return NAMED[name]
    raise ValueError(f"{value!r} is not part of an IPC handle")
