"""The devices of a run with their memory and speed, and how trainer processes and servers are placed on them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.config.schema import Run

GIB = 2**30
GPU_MEMORY = 80.0  # GiB, if this machine has no GPU
GPUS = {  # dense bfloat16 TFLOP/s, and TB/s of memory bandwidth, from NVIDIA's data sheets
    "H200": (989.0, 4.8),
    "H100": (989.0, 3.35),
    "A100": (312.0, 2.0),
    "L40S": (362.0, 0.86),
    "L4": (121.0, 0.3),
}
CPU_CORE = (0.05, 0.01)  # TFLOP/s and TB/s of one core of a server, to within a factor of three
FLOAT32_SLOWER = {"cpu": 2.0, "cuda": 15.0}
"""How much slower matrix products are in float32 than in bfloat16: on an H100 67 and 989 TFLOP/s, since TF32 is off."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The command line's options about devices; None: measured or assumed.

    memory: GiB of one device. devices: GPUs of one machine, with hardware=single. tflops, bandwidth: 1e12 operations
    and 1e12 bytes per second of one device.
    """

    memory: float | None = None
    devices: int | None = None
    tflops: float | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} {value:g}: must be a number above 0")


@dataclass(frozen=True, slots=True)
class Resources:
    """Devices, trainer processes and servers of a run.

    kind: "cpu" or "cuda". memory: bytes of one device; on a CPU, of the whole machine. tflops, bandwidth: 1e12
    operations and 1e12 bytes per second of one device. trainers: processes on all machines. servers: copies of the
    model on vLLM servers that the run starts, each on `tensor_parallel` devices. shared: servers use the trainers'
    devices. train_nodes, rollout_nodes: machines that train, and further ones that serve. assumed: sentences about
    values that were not measured.
    """

    kind: str
    memory: float
    tflops: float
    bandwidth: float
    trainers: int
    servers: int
    tensor_parallel: int
    shared: bool
    train_nodes: int
    rollout_nodes: int
    assumed: tuple[str, ...]

    @property
    def gpu(self) -> bool:
        return self.kind == "cuda"


def find_resources(run: Run, engine: Any, options: DeviceOptions) -> Resources:
    """The resources of a run. engine: the run's engine, with engine=auto resolved."""
    kind = device_kind(run)
    memory, tflops, bandwidth, assumed = _gpu(options) if kind == "cuda" else _cpu(options)
    servers, tensor_parallel = _servers(engine)
    rollout_nodes = run.hardware.rollout_nodes
    servers *= max(1, rollout_nodes)
    trainers, shared, more = _split(run, kind, servers * tensor_parallel, options)
    return Resources(
        kind,
        memory,
        tflops,
        bandwidth,
        trainers,
        servers,
        tensor_parallel,
        shared,
        run.hardware.nodes - rollout_nodes,
        rollout_nodes,
        (*assumed, *more),
    )


def device_kind(run: Run) -> str:
    """hardware.device, "cpu" or "cuda"; `auto` is what this machine has."""
    if run.hardware.device != "auto":
        return str(run.hardware.device)
    return "cuda" if gpus_here() else "cpu"


def shares_weights(run: Run) -> bool:
    """Whether weights are sharded over the trainer processes."""
    return run.hardware.parallel in ("fsdp2", "zero3")


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu(options: DeviceOptions) -> tuple[float, float, float, tuple[str, ...]]:
    import torch

    name, memory, assumed = "H100", GPU_MEMORY, "no GPU on this machine: an H100 with 80 GiB is assumed (--memory GIB)"
    if gpus_here():
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory / GIB
        assumed = f"this machine's GPU: {name}, {memory:.0f} GiB"
    elif options.memory:
        assumed = f"no GPU on this machine: one as fast as an H100, with {options.memory:g} GiB (--memory)"
    tflops, bandwidth = next((speed for known, speed in GPUS.items() if known in name), GPUS["A100"])
    return (
        (options.memory or memory) * GIB,
        options.tflops or tflops,
        options.bandwidth or bandwidth,
        (
            assumed,
            f"{options.tflops or tflops:g} TFLOP/s in bfloat16 and {options.bandwidth or bandwidth:g} TB/s per GPU",
        ),
    )


def _cpu(options: DeviceOptions) -> tuple[float, float, float, tuple[str, ...]]:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    tflops, bandwidth = options.tflops or cores * CPU_CORE[0], options.bandwidth or cores * CPU_CORE[1]
    memory = (
        f"{options.memory:g} GiB of memory (--memory)" if options.memory else f"this machine's {ram:.1f} GiB of memory"
    )
    return (
        (options.memory or ram) * GIB,
        tflops,
        bandwidth,
        (
            f"a CPU with {memory}; hardware.device=cuda plans for GPUs",
            f"{tflops:g} TFLOP/s in bfloat16 and {bandwidth:g} TB/s for {cores} cores: a guess (--tflops, --bandwidth)",
        ),
    )


def _servers(engine: Any) -> tuple[int, int]:
    """Copies of the model on vLLM servers that the run starts, and the GPUs of each copy."""
    from grpocli.rollout.vllm.engine_parts import Vllm

    if not isinstance(engine, Vllm) or engine.base_url is not None:
        return 0, 1
    return engine.replicas * engine.data_parallel, engine.tensor_parallel


def _split(run: Run, kind: str, serving: int, options: DeviceOptions) -> tuple[int, bool, tuple[str, ...]]:
    """Trainer processes, whether servers share their devices, and assumptions."""
    from grpocli.hardware.hardware import Multinode

    hardware = run.hardware
    if isinstance(hardware, Multinode):
        return hardware.processes, hardware.rollout_nodes == 0, ()
    if kind == "cpu":
        return hardware.processes or 1, True, ()
    devices = options.devices or gpus_here() or max(hardware.processes or 1, 1)
    train = _number(hardware.train_devices) or hardware.processes
    apart = (train or 1) + serving <= devices
    trainers = train or (devices - serving if serving and apart else devices)
    return trainers, not apart, (f"{devices} GPU{'s' if devices > 1 else ''} on the machine (--devices)",)


def _number(devices: Any) -> int | None:
    """The number of devices in hardware.train_devices; None for auto."""
    if devices == "auto":
        return None
    return devices if isinstance(devices, int) else len(devices)
