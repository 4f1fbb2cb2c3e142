"""The config group `hardware`, and what it means on this machine: its node, and which GPUs train and which serve."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import one_of, part, require
from grpocli.errors import ConfigError
from grpocli.processes.node import Node

if TYPE_CHECKING:
    import torch

    from grpocli.config.schema import Run

PARALLEL = ("ddp", "fsdp2", "zero3")


class Hardware:
    """Keys that both kinds of hardware share."""

    device: str
    """`auto` (a GPU if there is one), `cpu` or `cuda`."""
    parallel: str
    """How model states are distributed over trainer processes. `ddp`: everything is replicated. `fsdp2`: weights,
    gradients and optimizer state are sharded (torch); `zero3`: the same (DeepSpeed)."""
    context_parallel: int
    """N, the number of trainer processes that share each micro-batch, for rows that fit no device
    (docs/long_rows.md): each holds one N-th of the tokens of every sequence. It divides the number of trainer processes
    and of attention heads. 1: every process has micro-batches of its own."""
    timeout: int
    """Timeout in seconds for a process that waits for the others; the run stops when it expires."""

    @property
    def processes(self) -> int | None:
        """Trainer processes on all machines; None if one for each GPU that trains."""
        raise NotImplementedError

    def _check(self) -> None:
        one_of(self, "device", ("auto", "cpu", "cuda"))
        one_of(self, "parallel", PARALLEL)
        require(self, "context_parallel", 1 <= self.context_parallel <= 1024, "must be between 1 and 1024")
        require(self, "timeout", 1 <= self.timeout <= 10**9, "must be at least 1 second, and no more than 1e9")

    def check_run(self, run: Run) -> None:
        """Require that the other keys fit the processes, which wait longer for each other than for a lost server."""
        parallel, n, processes = self.parallel, self.context_parallel, self.processes
        for key, seconds in run.engine.waits.items() if (processes or 1) > 1 else ():
            problem = f"must be above the {seconds:g} s that the run may wait ({key})"
            require(self, "timeout", seconds < self.timeout, problem)
        whole = parallel != "zero3" or run.algorithm.kl.sync_every == 0
        problem = "a sharded reference cannot follow the policy (algorithm.kl.sync_every): take fsdp2 or ddp"
        require(self, "parallel", whole, problem)
        if n > 1:
            works = parallel in ("ddp", "fsdp2")
            require(self, "context_parallel", works, f"works with hardware.parallel=ddp or fsdp2, not with {parallel}")
            require(self, "context_parallel", run.train.packed, "splits packed rows: set train.packed=true")
            problem = "needs packed rows, and a repetition penalty padded ones: set rollout.repetition_penalty=1"
            require(self, "context_parallel", run.rollout.repetition_penalty == 1, problem)
            problem = f"must divide the number of trainer processes, {processes}"
            require(self, "context_parallel", processes is None or processes % n == 0, problem)

    def check_ready(self) -> None:
        """Raise ConfigError without DeepSpeed, if the run needs it."""
        there = not self.parallel.startswith("zero") or find_spec("deepspeed") is not None
        hint = "pip install '.[deepspeed]' in a clone of grpocli, or choose fsdp2"
        require(self, "parallel", there, "needs DeepSpeed, which is not installed", hint)


@part("hardware", "single")
class Single(Hardware):
    """One machine with all of its GPUs."""

    processes: int | None = None
    """Trainer processes, 1 to 1024. null: one for each GPU that trains, or one on a CPU."""
    train_devices: Any = "auto"
    """How many GPUs train, the first ones. `auto`: all that the servers leave. A single GPU is shared with them."""
    rollout_devices: Any = "auto"
    """How many GPUs serve (engine=vllm), the last ones. `auto`: as many as the servers need."""
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
            value = getattr(self, field)
            ok = value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
            require(self, field, ok, "give auto, or how many GPUs")


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


def node_of(hardware: Hardware) -> Node | None:
    """This machine's node in the job; None for a run on one machine.

    Raises ConfigError if a run on several machines is not in a SLURM allocation.
    """
    if not isinstance(hardware, Multinode):
        return None
    node = Node.here()
    if node is None or not node.port:
        problem = "runs in a SLURM allocation: start it with `grpocli train -m hydra/launcher=slurm ...`"
        raise ConfigError(problem, key="hardware", value="multinode")
    require(
        hardware, "train_nodes", node.count == hardware.train_nodes, f"the job step has {node.count}: submit it again"
    )
    return node


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one machine."""

    processes: int
    """Its trainer processes."""
    train: tuple[str, ...] = ()
    """GPUs that train, by their names in CUDA_VISIBLE_DEVICES; none on a CPU."""
    rollout: tuple[str, ...] = ()
    """GPUs that serve."""

    @property
    def shared(self) -> bool | None:
        """Whether the servers' GPUs also train: True if all do, False if none does, None if some do."""
        both = set(self.rollout) & set(self.train)
        return None if both and both != set(self.rollout) else bool(both)

    def __str__(self) -> str:
        """`train on GPUs 0,1,2; serve on GPU 3`."""
        if not self.train:
            return f"train on the CPU in {self.processes} {'process' if self.processes == 1 else 'processes'}"
        serve = f"; serve on {_named(self.rollout)}" if self.rollout else ""
        return f"train on {_named(self.train)}{serve}"


def devices_of(hardware: Hardware, engine: Any) -> Devices:
    """The devices of this machine in a run. Raises ConfigError if it has too few GPUs."""
    gpus = [] if hardware.device == "cpu" else visible_gpus()
    if isinstance(hardware, Multinode):
        wanted = hardware.devices_per_node
        enough = wanted <= len(gpus) or not (gpus or hardware.device == "cuda")
        require(hardware, "devices_per_node", enough, f"{os.uname().nodename} has {len(gpus)} GPUs for this job")
        return Devices(wanted, tuple(gpus[:wanted]))
    assert isinstance(hardware, Single)
    if gpus:
        return split(hardware, engine, gpus)
    for field in ("train_devices", "rollout_devices"):
        require(hardware, field, getattr(hardware, field) == "auto", "there is no GPU to choose; leave it at auto")
    return Devices(hardware.processes or 1)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to `device`; from the CPU to a GPU through pinned memory, so that the CPU does not wait for it."""
    if tensor.device.type != "cpu":
        return tensor.to(device)  # waits, so that the numbers are there when it returns
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def visible_gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


def peak_memory_gib(device: torch.device) -> float:
    """The peak memory of this process in GiB: on a GPU since the last call, on a CPU since its start."""
    import torch

    if device.type == "cuda":
        peak: int = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB on Linux


def split(hardware: Single, engine: Any, gpus: Sequence[str]) -> Devices:
    """Assign GPUs: the last ones to the servers, as many as they need, and the rest to the trainer.

    Too few GPUs are shared. Raises ConfigError if the config asks for more GPUs than there are.
    """
    needed = int(engine.server_gpus)
    if needed > len(gpus):
        problem = f"needs {needed} GPUs, {needed // engine.replicas} for each server, and there are {len(gpus)}"
        hint = "lower it, or engine.tensor_parallel or engine.data_parallel"
        raise ConfigError(problem, key="engine.replicas", value=engine.replicas, hint=hint)
    problem = "the run starts no vLLM server that could use them: choose engine=vllm, or leave it at auto"
    require(hardware, "rollout_devices", bool(needed) or hardware.rollout_devices == "auto", problem)
    train = _chosen(hardware, "train_devices", gpus)
    rollout = _chosen(hardware, "rollout_devices", gpus) if needed else ()
    if rollout is None:
        left = [gpu for gpu in gpus if gpu not in (train or gpus[: hardware.processes or 0])]
        rollout = tuple((left if len(left) >= needed and len(gpus) > needed else list(gpus))[-needed:])
    require(hardware, "rollout_devices", len(rollout) >= needed, f"the servers of engine=vllm need {needed} GPUs")
    train = train or tuple(gpu for gpu in gpus if gpu not in rollout) or tuple(gpus)
    processes = hardware.processes or len(train)
    problem = f"each process needs its own GPU, and {len(train)} are left to train"
    require(hardware, "processes", processes <= len(train), problem)
    return Devices(processes, train[:processes], rollout)


def _chosen(hardware: Single, field: str, gpus: Sequence[str]) -> tuple[str, ...] | None:
    """The GPUs of a key: the first ones to train, the last ones to serve; None for auto."""
    value = getattr(hardware, field)
    if value == "auto":
        return None
    require(hardware, field, value <= len(gpus), f"there are only the GPUs {','.join(gpus)} here")
    return tuple(gpus[:value] if field == "train_devices" else gpus[-value:])


def _named(gpus: Sequence[str]) -> str:
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {','.join(gpus)}"
