"""The devices of a run with their memory and speed, and how trainer processes and servers are placed on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.hardware import Multinode, split, visible_gpus
from grpocli.text import counted

if TYPE_CHECKING:
    from grpocli.config.schema import Run

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet.

    memory: GiB. tflops: 1e12 operations per second in 16 bits, dense. bandwidth: of its memory, 1e12 bytes per second.
    link: bytes per second that it receives from other GPUs of its machine. dtype: that of 16 bits.
    """

    memory: float
    tflops: float
    bandwidth: float
    link: float
    dtype: str = "bfloat16"


MAX_DEVICES = 100_000

GPUS = {
    "H200": Gpu(140.0, 989.0, 4.8, 450e9),
    "H100 PCIe": Gpu(80.0, 756.0, 2.0, 64e9),
    "H100": Gpu(80.0, 989.0, 3.35, 450e9),
    "H20": Gpu(96.0, 148.0, 4.0, 450e9),
    "A100": Gpu(80.0, 312.0, 2.0, 300e9),
    "A6000": Gpu(48.0, 155.0, 0.768, 32e9),
    "L40S": Gpu(48.0, 362.0, 0.86, 32e9),
    "L40": Gpu(48.0, 181.0, 0.864, 32e9),
    "L4": Gpu(24.0, 121.0, 0.3, 32e9),
    "V100 32GB": Gpu(32.0, 125.0, 0.9, 150e9, "float16"),
    "V100": Gpu(16.0, 125.0, 0.9, 150e9, "float16"),
    "T4": Gpu(15.0, 65.0, 0.3, 16e9, "float16"),
    "RTX 2080 Ti": Gpu(11.0, 53.8, 0.616, 16e9, "float16"),
}
"""From NVIDIA's data sheets. The first name that is part of a device's name counts."""
ASSUMED_GPU = "H100"  # if this machine has no GPU
BETWEEN_MACHINES = 50e9
"""Bytes per second from a GPU to another machine: 400 Gbit/s for each GPU. A collective uses all GPUs of a machine."""
BETWEEN_PROCESSES = 5e9
"""Bytes per second between processes on a CPU."""
CPU_CORE = (0.05, 0.01)  # TFLOP/s and TB/s of one core of a server, to within a factor of three
FLOAT32_SLOWER = {"cpu": 2.0, "cuda": 15.0}
"""How much slower matrix products are in float32 than in bfloat16: on an H100 67 and 989 TFLOP/s, since TF32 is off."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The command line's options about devices; None: measured or assumed.

    gpu: a name of `GPUS`. memory: GiB of one device. devices: GPUs of one machine, with hardware=single. tflops,
    bandwidth: 1e12 operations and 1e12 bytes per second of one device.
    """

    memory: float | None = None
    devices: int | None = None
    tflops: float | None = None
    bandwidth: float | None = None
    gpu: str | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in GPUS:
            raise ConfigError(f"--gpu {self.gpu}: is not known; choose from {', '.join(GPUS)}")
        for name in ("memory", "devices", "tflops", "bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} {value:g}: must be a number above 0")
        if self.devices is not None and self.devices > MAX_DEVICES:
            raise ConfigError(f"--devices {self.devices}: must be at most {MAX_DEVICES:,}")


@dataclass(frozen=True, slots=True)
class Resources:
    """Devices, trainer processes and servers of a run.

    kind: "cpu" or "cuda". memory: bytes of one device; on a CPU, of the whole machine. tflops, bandwidth: 1e12
    operations and 1e12 bytes per second of one device. link: bytes per second that a trainer receives from others.
    dtype: of those operations.
    trainers: processes on all machines. servers: copies of the model on vLLM servers that the run starts, each on
    `tensor_parallel` devices. shared: servers use the trainers' devices. train_nodes, rollout_nodes: machines that
    train, and further ones that serve. devices: GPUs of the machine, with hardware=single. assumed: sentences about
    values that were not measured.
    """

    kind: str
    memory: float
    tflops: float
    bandwidth: float
    link: float
    dtype: str
    trainers: int
    servers: int
    tensor_parallel: int
    shared: bool
    train_nodes: int
    rollout_nodes: int
    devices: int | None
    assumed: tuple[str, ...]

    @property
    def gpu(self) -> bool:
        return self.kind == "cuda"


def find_resources(run: Run, engine: Any, options: DeviceOptions) -> Resources:
    """The resources of a run. engine: the run's engine, with engine=auto resolved."""
    kind = device_kind(run)
    device, assumed = _gpu(options) if kind == "cuda" else _cpu(options)
    tensor_parallel = engine.tensor_parallel if engine.server_gpus else 1
    rollout_nodes = run.hardware.rollout_nodes
    servers = engine.server_gpus // tensor_parallel * max(1, rollout_nodes)
    trainers, shared, devices = _split(run, kind, engine, options)
    if devices:
        assumed = (*assumed, f"{counted(devices, 'GPU')} on the machine (--devices)")
    several = run.hardware.nodes - rollout_nodes > 1
    link = min(device.link, BETWEEN_MACHINES * run.hardware.devices_per_node) if several else device.link
    return Resources(
        kind,
        device.memory * GIB,
        device.tflops,
        device.bandwidth,
        link,
        device.dtype,
        trainers,
        servers,
        tensor_parallel,
        shared,
        run.hardware.nodes - rollout_nodes,
        rollout_nodes,
        devices,
        assumed,
    )


def device_kind(run: Run) -> str:
    """hardware.device, "cpu" or "cuda"; `auto` is what this machine has."""
    if run.hardware.device != "auto":
        return str(run.hardware.device)
    return "cuda" if visible_gpus() else "cpu"


def shares_weights(run: Run) -> bool:
    """Whether weights are sharded over the trainer processes."""
    return run.hardware.parallel in ("fsdp2", "zero3")


def _gpu(options: DeviceOptions) -> tuple[Gpu, tuple[str, ...]]:
    """The planned GPU: --gpu, this machine's, or an assumed one; single figures from the options."""
    import torch

    if options.gpu:
        gpu, source = GPUS[options.gpu], f"{options.gpu} (--gpu)"
    elif visible_gpus():
        properties = torch.cuda.get_device_properties(0)
        known = next((gpu for name, gpu in GPUS.items() if name in properties.name), GPUS["A100"])
        gpu, source = replace(known, memory=properties.total_memory / GIB), f"this machine's GPU: {properties.name}"
    else:
        gpu, source = GPUS[ASSUMED_GPU], f"no GPU on this machine: an {ASSUMED_GPU} is assumed (--gpu)"
    given = {name: getattr(options, name) for name in ("memory", "tflops", "bandwidth") if getattr(options, name)}
    gpu = replace(gpu, **given)
    speeds = f"{gpu.memory:g} GiB, {gpu.tflops:g} TFLOP/s in {gpu.dtype} and {gpu.bandwidth:g} TB/s per GPU"
    return gpu, (source, speeds)


def _cpu(options: DeviceOptions) -> tuple[Gpu, tuple[str, ...]]:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    tflops, bandwidth = options.tflops or cores * CPU_CORE[0], options.bandwidth or cores * CPU_CORE[1]
    memory = (
        f"{options.memory:g} GiB of memory (--memory)" if options.memory else f"this machine's {ram:.1f} GiB of memory"
    )
    return (
        Gpu(options.memory or ram, tflops, bandwidth, BETWEEN_PROCESSES),
        (
            f"a CPU with {memory}; hardware.device=cuda plans for GPUs",
            f"{tflops:g} TFLOP/s in bfloat16 and {bandwidth:g} TB/s for {cores} cores: a guess (--tflops, --bandwidth)",
        ),
    )


def _split(run: Run, kind: str, engine: Any, options: DeviceOptions) -> tuple[int, bool, int | None]:
    """Trainer processes, whether servers share their devices, and the GPUs of the machine with hardware=single.

    Without `--devices` and a GPU, the fewest with which the run starts. Raises ConfigError as the run does.
    """
    hardware = run.hardware
    if isinstance(hardware, Multinode):
        return hardware.processes, hardware.rollout_nodes == 0, None
    if kind == "cpu":
        return hardware.processes or 1, True, None
    train, serve = hardware.processes or 1, engine.server_gpus
    devices = options.devices or len(visible_gpus()) or (serve if train <= serve else train + serve)
    try:
        found = split(hardware, engine, [str(number) for number in range(devices)])
    except ConfigError as error:
        raise error.with_note("--devices") from error
    return found.processes, found.shared is not False, devices
