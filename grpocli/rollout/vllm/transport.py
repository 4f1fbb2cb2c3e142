"""How weights get to servers: what every transport is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from grpocli.rollout.engine import Policy
    from grpocli.rollout.vllm.protocol import Server

T = TypeVar("T")
BACKENDS = {"shm": "shm", "nccl": "nccl", "ipc": "ipc_json"}
"""The name under which the server's `--weight-transfer-config` knows each transport."""


class Meta(NamedTuple):
    """A parameter before it is gathered."""

    name: str
    shape: tuple[int, ...]


class Weights:
    """A policy's parameters for a server that computes in `dtype`, whole ones: sharded parameters are gathered.

    A gather is collective. So every process walks through `stream()` in the same order, and to its end.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.policy, self.dtype = policy, dtype

    @property
    def sharded(self) -> bool:
        """Whether other processes hold a part (FSDP2: the parameters are DTensors; ZeRO-3: they are empty)."""
        parameters = self.policy.model.parameters()
        return any(hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_shape") for parameter in parameters)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One whole parameter at a time, in the dtype it is trained in."""
        for name, tensor in self.policy.weights():
            part = tensor.detach()
            yield name, part.full_tensor() if hasattr(part, "full_tensor") else part

    def metadata(self) -> list[Meta]:
        """What `stream` will yield, without a gather."""
        model = self.policy.model
        if any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):  # ZeRO-3, which has no LoRA
            return [Meta(name, tuple(parameter.ds_shape)) for name, parameter in model.named_parameters()]
        return [Meta(name, tuple(tensor.shape)) for name, tensor in self.policy.weights()]

    def bytes(self) -> int:
        """How much goes to a server."""
        return sum(torch.Size(meta.shape).numel() for meta in self.metadata()) * self.dtype.itemsize


class Transport(Protocol):
    """One way from the policy to all servers."""

    everywhere: bool
    """Whether every process calls `send` (each GPU hands over its own memory), or the main one alone."""

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Make new servers ready, then start, update and finish on every server; the bytes that each one got.

        Raises EngineError. The servers are paused.
        """
        ...

    def close(self) -> None: ...


def each(servers: Sequence[Server], call: Callable[[Server], T]) -> list[T]:
    """Call every server at once and wait for all; then raise what the first of them raised."""
    if len(servers) == 1:
        return [call(servers[0])]
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(call, server) for server in servers]
    return [future.result() for future in futures]


def prepare(servers: Sequence[Server], infos: Sequence[dict[str, object]]) -> None:
    """Let every server get ready for transfers."""
    each_info = dict(zip(map(id, servers), infos, strict=True))

    def one(server: Server) -> None:
        server.init_transfer(each_info[id(server)])
        server.prepared = True

    each(servers, one)
