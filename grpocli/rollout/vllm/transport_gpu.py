"""sync=nccl and sync=ipc: vLLM's own trainer engines, driven through our servers' interface.

Neither has been run on a GPU yet; the tests cover what they say to the servers. vLLM is imported when the first sync
needs it: it is heavy.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.transport import Weights, each, prepare
from grpocli.rollout.vllm.transport_ipc import encode_handles

if TYPE_CHECKING:
    from grpocli.rollout.vllm.protocol import Server

T = TypeVar("T")
DEADLINE = 600.0  # seconds for one transfer; NCCL itself waits for ever
POLL = 0.1
Stream = Iterator[tuple[str, torch.Tensor]]


class Source:
    """vLLM's `WeightSource` (by its methods) over the stream of one sync, cast to the server's dtype."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.stream: Stream = iter(())

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.weights.dtype, shape) for name, shape in self.weights.metadata()]

    def __iter__(self) -> Stream:
        for name, tensor in self.stream:
            yield name, tensor.to(self.weights.dtype)


class SyncClient:
    """vLLM's `VLLMWeightSyncClient` over all servers at once.

    A failure is kept and later calls do nothing: the collective work of a transfer goes on to its end in step with the
    other processes, and then `check` raises.
    """

    def __init__(self) -> None:
        self.servers: Sequence[Server] = ()
        self.version = 0
        self.failure: EngineError | None = None

    def begin(self, servers: Sequence[Server], version: int) -> None:
        self.servers, self.version, self.failure = servers, version, None

    def check(self) -> None:
        if self.failure:
            raise self.failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Workers of several servers are one group: the ranks of each server begin after those of the one before."""
        self._try(lambda: prepare(self.servers, init_infos(self.servers, init_info)))

    def start_weight_update(self) -> None:
        self._each(lambda server: server.start_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if update_info.get("ipc_handles") is not None:
            update_info = {**update_info, "ipc_handles": encode_handles(update_info["ipc_handles"])}
        info = {name: value for name, value in update_info.items() if value is not None}
        self._each(lambda server: server.update(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(lambda server: server.finish_update(self.version))

    def _each(self, call: Callable[[Server], None]) -> None:
        self._try(lambda: each(self.servers, call))

    def _try(self, call: Callable[[], Any]) -> None:
        if self.failure:
            return
        try:
            call()
        except EngineError as error:
            self.failure = error


def init_infos(servers: Sequence[Server], info: dict[str, Any]) -> list[dict[str, object]]:
    """What each server is told; its first rank comes after those of the servers before it."""
    infos: list[dict[str, object]] = []
    offset = info.get("rank_offset", 0)
    for server in servers:
        infos.append(info | {"rank_offset": offset} if "rank_offset" in info else dict(info))
        offset += server.world_size()
    return infos


def packing(bucket: int) -> dict[str, Any]:
    """How trainer and servers pack tensors, `bucket` bytes at a time. Both need the same values.

    One buffer: with several, vLLM's loader may still read one that is being refilled.
    """
    return {"packed": True, "packed_buffer_size_bytes": bucket, "packed_num_buffers": 1}


class NcclTransport:
    """Broadcasts from the main process's GPU to every GPU of the servers, in packed buckets.

    The group's id goes over the authenticated HTTP connection, so no rendezvous store is opened: vLLM's own has no
    password and unpickles what it finds.
    """

    everywhere = False

    def __init__(self, weights: Weights, bucket: int) -> None:
        self.weights, self.bucket = weights, bucket
        self.source, self.client = Source(weights), SyncClient()
        self._engine: Any = None

    def send(self, servers: Sequence[Server], weights: Stream, version: int) -> int:
        self.client.begin(servers, version)
        self.source.stream = weights
        if self._engine is None or not all(server.prepared for server in servers):
            self.close()
            in_thread(
                DEADLINE, "the servers to join the trainer's NCCL group (sync=nccl)", self._join, self.client.check
            )
        try:
            in_thread(DEADLINE, "the weights to be broadcast (sync=nccl)", self._transfer, self.client.check)
        except EngineError:
            self.close()  # aborts the broadcast, which would block the GPU and whatever frees memory on it
            raise
        return self.weights.bytes()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _transfer(self) -> None:
        self._engine.send_weights()
        self.client.check()

    def _join(self) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        packed = packing(self.bucket)
        size = 1 + sum(server.world_size() for server in self.client.servers)
        uid = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        info = {"rank_offset": 1, "world_size": size, "nccl_unique_id_b64": base64.b64encode(uid).decode(), **packed}
        engine = NCCLTrainerWeightTransferEngine(client=self.client, source=self.source, **packed)
        with ThreadPoolExecutor(1) as asking:  # the servers answer once the trainer has joined too
            joined = asking.submit(self.client.init_weight_transfer_engine, info)
            engine.model_update_group = uid_init_process_group(uid, 0, size, torch.accelerator.current_device_index())
            joined.result()
        self.client.check()
        self._engine = engine


class IpcTransport:
    """Hands over CUDA memory, a packed bucket at a time; a server's worker takes it from the process on its own GPU.

    So every process sends: the handles are gathered, and the main process tells the servers.
    """

    everywhere = True

    def __init__(self, weights: Weights, bucket: int, rank: int) -> None:
        self.weights, self.bucket, self.rank = weights, bucket, rank
        self.source, self.client = Source(weights), SyncClient()
        self._engine: Any = None

    def send(self, servers: Sequence[Server], weights: Stream, version: int) -> int:
        self.client.begin(servers, version)
        self.source.stream = weights
        if self._engine is None:
            self._engine = self._make()
        elif not all(server.prepared for server in servers):
            self.client.init_weight_transfer_engine({"packed": True})
        in_thread(DEADLINE, "the weights to be handed over (sync=ipc)", self._engine.send_weights)
        self.client.check()
        return self.weights.bytes()

    def close(self) -> None:
        self._engine = None

    def _make(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        itemsize = self.weights.dtype.itemsize
        largest = max(torch.Size(shape).numel() for _, shape in self.weights.metadata()) * itemsize
        info = IPCTrainerInitInfo(rank=self.rank, packed=True, packed_buffer_size_bytes=max(self.bucket, largest))
        return WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=self.source)


def in_thread(seconds: float, what: str, call: Callable[[], None], check: Callable[[], None] = lambda: None) -> None:
    """Run `call` in a thread on the same device; `check` raises where waiting for it has become pointless.

    Raises EngineError for what it raises, and after `seconds`.
    """
    box: list[Exception] = []
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            call()
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        thread.join(POLL)
        if thread.is_alive():
            check()
            if time.monotonic() > deadline:
                raise EngineError(f"waited {seconds:g} s for {what}")
    if box:
        raise box[0] if isinstance(box[0], EngineError) else EngineError(f"{what}: {box[0]}") from box[0]
