"""What weight syncs to vLLM rest on, without a server: CUDA IPC handles as JSON, and the buckets of sync=nccl."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from experiment import Measured, Setting, at_least, at_most, experiment, true

READER = """
import json, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from grpocli.rollout.vllm.transports import decode_handles

for k, line in enumerate(sys.stdin):
    (arguments,) = decode_handles(json.loads(line)).values()
    arguments = [*arguments[:6], torch.cuda.current_device(), *arguments[7:]]  # as vLLM's worker
    tensor = rebuild_cuda_tensor(*arguments)
    print(json.dumps([list(tensor.shape), str(tensor.dtype), int(tensor.view(torch.uint8).long().sum())]), flush=True)
    if k < 2:
        del tensor  # releases the export, as vLLM does at the end of an update
"""


@experiment(
    "transfers",
    "CUDA IPC handles as JSON into another process (sync=ipc)",
    true("equal", "another process reads the same bytes"),
    true("follows", "and sees a later change of the buffer"),
    at_least("held_mib", 16, "MiB that torch keeps for a reader that was killed before it released them"),
    at_most("left_mib", 1, "MiB of these that are left once the trainer releases them, as after a failed sync"),
    needs=("gpu",),
)
def ipc_handles(setting: Setting) -> Measured:
    from torch.multiprocessing.reductions import reduce_tensor

    from grpocli.rollout.vllm.transports import encode_handles, release

    before = torch.cuda.memory_allocated()
    buffer = torch.randint(0, 255, (2**24,), dtype=torch.uint8, device="cuda")
    command = [sys.executable, "-c", READER]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin
    assert reader.stdout
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    answers = []
    for _ in range(3):
        torch.cuda.synchronize()
        _, arguments = reduce_tensor(buffer)  # an export for each reading
        reader.stdin.write(json.dumps(encode_handles({uuid: arguments})) + "\n")
        reader.stdin.flush()
        answers.append((json.loads(reader.stdout.readline()), int(buffer.long().sum())))
        buffer.add_(1)
    reader.kill()
    reader.wait(60)
    del buffer
    torch.cuda.ipc_collect()
    held = torch.cuda.memory_allocated() - before
    release(arguments)
    return {
        "equal": answers[0][0] == [[2**24], "torch.uint8", answers[0][1]],
        "follows": answers[1][0][2] == answers[1][1],
        "held_mib": held / 2**20,
        "left_mib": (torch.cuda.memory_allocated() - before) / 2**20,
    }


class Group:
    """A group whose broadcast copies from a tensor of this process, bucket after bucket."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source, self.sent = source, 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        tensor.copy_(self.source[self.sent : self.sent + len(tensor)])
        self.sent += len(tensor)


class LateLoader:
    """Loads as vLLM's layerwise reload: the last tensor of a bucket is of a layer that the next bucket completes.

    That layer's copy is made late, as on a busy GPU.
    """

    def __init__(self, target: torch.Tensor, size: int) -> None:
        self.target, self.size = target, size
        self.kept: list[tuple[str, torch.Tensor]] = []

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        *complete, last = weights
        # vLLM makes a layer anew, maybe where a freed bucket was
        layer = torch.zeros(self.size * len(weights), dtype=torch.uint8, device=self.target.device)
        for part, (name, tensor) in zip(layer.split(self.size), complete, strict=False):
            part.copy_(tensor)
            self._put(name, part)
        kept, self.kept = self.kept, [last]
        if kept:
            torch.cuda._sleep(50_000_000)  # cycles of the GPU, tens of milliseconds
        for name, tensor in kept:
            self._put(name, tensor)

    def finish(self) -> None:
        for name, tensor in self.kept:
            self._put(name, tensor)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        start = int(name) * self.size
        self.target[start : start + self.size].copy_(tensor)


@experiment(
    "transfers",
    "vLLM's consumer of packed buckets, a loader that is late: bytes of 32 MiB that are wrong (sync=nccl)",
    at_most("wrong_with_one_buffer", 0, "with one buffer, as grpocli asks for"),
    at_least("wrong_with_two_buffers", 1, "with two, vLLM's default: the race that the one buffer avoids"),
    needs=("gpu", "vllm"),
    seconds=80,
)
def bucket_race(setting: Setting) -> Measured:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    size, count = 2**20, 32
    source = torch.randint(0, 255, (size * count,), dtype=torch.uint8, device="cuda")

    def names() -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
        return ((str(k), ([size], torch.uint8)) for k in range(count))

    found: Measured = {}
    for buffers, word in ((1, "one_buffer"), (2, "two_buffers")):
        wrong = []
        for _ in range(5):
            target = torch.zeros_like(source)
            loader = LateLoader(target, size)
            torch.cuda.synchronize()
            packed_nccl_broadcast_consumer(
                names(), Group(source), 0, loader.load, buffer_size_bytes=3 * size, num_buffers=buffers
            )
            loader.finish()
            torch.cuda.synchronize()
            wrong.append(int((target != source).sum()))
        found |= {f"wrong_with_{word}": max(wrong), f"each_with_{word}": wrong}
    return found


class CopiedGroup:
    """A group whose broadcast keeps a copy of each bucket."""

    def __init__(self) -> None:
        self.buckets: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self.buckets.append(tensor.clone())


@experiment(
    "transfers",
    "sync=nccl right after a change of the weights, whose kernels still run: bytes sent that are old",
    at_least("sent_mib", 64, "MiB sent each time"),
    at_most("old", 0, "bytes of these that are old"),
    needs=("gpu", "vllm"),
    seconds=80,
)
def sent_after_a_change(setting: Setting) -> Measured:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    from grpocli.rollout.vllm.transports import NcclTransport, packing

    size, count = 2**20, 64
    weights = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(count)]

    how = packing(4 * size)
    sizes = {"buffer_size_bytes": how["packed_buffer_size_bytes"], "num_buffers": how["packed_num_buffers"]}
    policy: Any = SimpleNamespace(dtype=torch.uint8)

    def send(source: Any, group: CopiedGroup) -> None:
        """As vLLM's trainer engine, without servers: its producer, in streams of its own."""
        packed_nccl_broadcast_producer(iter(source), group, 0, lambda item: item[1], **sizes)

    old, sent = [], []
    for value in range(1, 6):
        transport, group = NcclTransport(policy, 4 * size), CopiedGroup()
        transport._engine = SimpleNamespace(send_weights=partial(send, transport.source, group))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # as kernels that come before the change, tens of milliseconds
        for weight in weights:
            weight.fill_(value)
        transport.send([], ((str(k), weight) for k, weight in enumerate(weights)), value)
        torch.cuda.synchronize()
        old.append(sum(int((bucket != value).sum()) for bucket in group.buckets))
        sent.append(sum(bucket.numel() for bucket in group.buckets) / 2**20)
    return {"sent_mib": min(sent), "old": max(old), "each": old}
