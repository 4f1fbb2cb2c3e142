"""The config group `hardware`: machines, devices and processes."""

from __future__ import annotations

from typing import Any

from grpocli.config.parts import key_of, one_of, part, require
from grpocli.errors import ConfigError
from grpocli.processes.node import Node

PARALLEL = ("ddp", "fsdp2", "zero2", "zero3")
"""How model states are distributed over trainer processes. `ddp`: everything is replicated. `fsdp2`: weights, gradients
and optimizer state are sharded (torch). `zero2`: gradients and optimizer state are sharded; `zero3`: weights too
(DeepSpeed)."""


class Hardware:
    """Keys that both kinds of hardware share."""

    device: str
    """`auto` (a GPU if there is one), `cpu` or `cuda`."""
    parallel: str
    """How model states are distributed over trainer processes. `ddp`: everything is replicated. `fsdp2`: weights,
    gradients and optimizer state are sharded (torch). `zero2`: gradients and optimizer state are sharded; `zero3`:
    weights too (DeepSpeed)."""
    context_parallel: int
    """N, the number of trainer processes that share each micro-batch, for rows that fit no device
    (docs/long_rows.md): each holds one N-th of the tokens of every sequence. It divides the number of trainer processes
    and of attention heads. 1: every process has micro-batches of its own."""
    timeout: int
    """Timeout in seconds for a process that waits for the others; the run stops when it expires."""

    def _check(self) -> None:
        one_of(self, "device", ("auto", "cpu", "cuda"))
        one_of(self, "parallel", PARALLEL)
        require(self, "context_parallel", 1 <= self.context_parallel <= 1024, "must be between 1 and 1024")
        require(self, "timeout", 1 <= self.timeout <= 10**9, "must be at least 1 second, and no more than 1e9")


@part("hardware", "single")
class Single(Hardware):
    """One machine with all of its GPUs."""

    processes: int | None = None
    """Trainer processes, 1 to 1024. null: one for each GPU that trains, or one on a CPU."""
    train_devices: Any = "auto"
    """GPUs that train: how many, or a list of their numbers. `auto`: all that the servers leave. A single GPU is shared
    with the server."""
    rollout_devices: Any = "auto"
    """GPUs that serve (engine=vllm): how many, or a list of their numbers. `auto`: as many as the servers need."""
    device: str = "auto"
    parallel: str = "ddp"
    context_parallel: int = 1
    timeout: int = 1800

    nodes = train_nodes = 1
    rollout_nodes = 0

    def __post_init__(self) -> None:
        self._check()
        ok = self.processes is None or 1 <= self.processes <= 1024
        require(self, "processes", ok, "must be null (one for each training device), or between 1 and 1024")
        for field in ("train_devices", "rollout_devices"):
            _check_devices(self, field)


@part("hardware", "multinode")
class Multinode(Hardware):
    """Several identical nodes of a SLURM allocation (`hydra/launcher=slurm`)."""

    train_nodes: int = 1
    """Number of training nodes."""
    rollout_nodes: int = 1
    """Number of nodes that serve completions (engine=vllm); 0 if the engine runs in the trainer processes."""
    devices_per_node: int = 8
    """GPUs of each machine, 1 to 1024; on CPUs, trainer processes of each machine."""
    device: str = "auto"
    parallel: str = "fsdp2"
    context_parallel: int = 1
    timeout: int = 1800

    def __post_init__(self) -> None:
        self._check()
        require(self, "train_nodes", self.train_nodes >= 1, "must be at least 1")
        require(self, "rollout_nodes", self.rollout_nodes >= 0, "must be 0 or more")
        require(self, "devices_per_node", 1 <= self.devices_per_node <= 1024, "must be between 1 and 1024")

    @property
    def processes(self) -> int:
        """Trainer processes on all machines."""
        return self.train_nodes * self.devices_per_node

    @property
    def nodes(self) -> int:
        return self.train_nodes + self.rollout_nodes


def _check_devices(owner: Single, field: str) -> None:
    value = getattr(owner, field)
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return
    numbers = isinstance(value, list | tuple) and value and all(isinstance(n, int) and n >= 0 for n in value)
    if not numbers or len(set(value)) < len(value):
        raise ConfigError(
            "give auto, how many GPUs, or a list of their numbers such as [0,1]", key=key_of(owner, field), value=value
        )


def node_of(hardware: Hardware) -> Node | None:
    """This machine's node in the job; None for a run on one machine.

    Raises ConfigError if a run on several machines is not in a SLURM allocation.
    """
    if not isinstance(hardware, Multinode):
        return None
    node = Node.here()
    if node is None or not node.port:
        raise ConfigError(
            "runs in a SLURM allocation: start it with `grpocli train -m hydra/launcher=slurm ...`",
            key="hardware",
            value="multinode",
        )
    if node.count != hardware.train_nodes:
        raise ConfigError(
            f"the job step has {node.count}: submit the run again",
            key="hardware.train_nodes",
            value=hardware.train_nodes,
        )
    return node
