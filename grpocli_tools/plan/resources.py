"""The devices of a run with their memory and speed, and how trainer processes and servers are placed on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config import yaml_text
from grpocli.hardware import Multinode, split, visible_gpus
from grpocli.text import counted

if TYPE_CHECKING:
    from grpocli.config.schema import Run

GIB = 2**30


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What one device can do, as speeds.yaml says."""

    memory: float
    tflops: float
    bandwidth: float
    link: float
    dtype: str = "bfloat16"


SPEEDS: dict[str, dict[str, dict[str, Any]]] = yaml_text.load(
    Path(__file__).with_name("speeds.yaml").read_text(encoding="utf-8")
)
"""What devices reach."""
GPUS = {name: DataSheet(**one) for name, one in SPEEDS["gpus"].items()}
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
    """The command line's options about devices; None: measured or assumed."""

    memory: float | None = None
    """GiB of one device."""
    devices: int | None = None
    """GPUs of one machine, with hardware=single."""
    tflops: float | None = None
    bandwidth: float | None = None
    gpu: str | None = None
    """A name of `GPUS`."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Devices, trainer processes and servers of a run."""

    kind: str
    """`cpu` or `cuda`."""
    memory: float
    """Bytes of one device; on a CPU, of the whole machine."""
    tflops: float
    bandwidth: float
    link: float
    """Bytes per second that a trainer receives from the others."""
    dtype: str
    """That of 16 bits."""
    trainers: int
    """Processes on all machines."""
    servers: int
    """Copies of the model on vLLM servers that the run starts."""
    tensor_parallel: int
    """Devices of a server."""
    shared: bool
    """Whether servers use the trainers' devices."""
    train_nodes: int
    """Machines that train."""
    rollout_nodes: int
    """Further machines, which serve."""
    devices: int | None
    """GPUs of the machine, with hardware=single."""
    assumed: tuple[str, ...]
    """Sentences about values that were not measured."""

    @property
    def gpu(self) -> bool:
        return self.kind == "cuda"


def find_resources(run: Run, engine: Any, options: DeviceOptions) -> Resources:
    """The resources of a run. engine: the run's engine, with engine=auto resolved. Raises ConfigError as the run does.

    Without `--devices` and a GPU on this machine there are as few GPUs as the run starts with.
    """
    hardware, kind = run.hardware, device_kind(run)
    sheet, assumed = _gpu(options) if kind == "cuda" else _cpu(options)
    trainers, shared, devices = hardware.processes or 1, True, None
    if isinstance(hardware, Multinode):
        shared = hardware.rollout_nodes == 0
    elif kind == "cuda":
        serve = engine.server_gpus
        devices = options.devices or len(visible_gpus()) or (serve if trainers <= serve else trainers + serve)
        found = split(hardware, engine, [str(number) for number in range(devices)])
        trainers, shared = found.processes, found.shared is not False
        assumed = (*assumed, f"{counted(devices, 'GPU')} on the machine (--devices)")
    tensor_parallel = engine.tensor_parallel if engine.server_gpus else 1
    train_nodes = hardware.nodes - hardware.rollout_nodes
    between = BETWEEN_MACHINES * hardware.devices_per_node if train_nodes > 1 else sheet.link
    return Resources(
        kind=kind,
        memory=sheet.memory * GIB,
        tflops=sheet.tflops,
        bandwidth=sheet.bandwidth,
        link=min(sheet.link, between),
        dtype=sheet.dtype,
        trainers=trainers,
        servers=engine.server_gpus // tensor_parallel * max(1, hardware.rollout_nodes),
        tensor_parallel=tensor_parallel,
        shared=shared,
        train_nodes=train_nodes,
        rollout_nodes=hardware.rollout_nodes,
        devices=devices,
        assumed=assumed,
    )


def device_kind(run: Run) -> str:
    """hardware.device, "cpu" or "cuda"; `auto` is what this machine has."""
    if run.hardware.device != "auto":
        return str(run.hardware.device)
    return "cuda" if visible_gpus() else "cpu"


def shares_weights(run: Run) -> bool:
    """Whether weights are sharded over the trainer processes."""
    return run.hardware.parallel in ("fsdp2", "zero3")


def _gpu(options: DeviceOptions) -> tuple[DataSheet, tuple[str, ...]]:
    """The planned GPU: --gpu, this machine's, or an assumed one; single figures from the options."""
    import torch

    if options.gpu:
        sheet, source = GPUS[options.gpu], f"{options.gpu} (--gpu)"
    elif visible_gpus():
        properties = torch.cuda.get_device_properties(0)
        known = next((gpu for name, gpu in GPUS.items() if name in properties.name), GPUS["A100"])
        sheet, source = replace(known, memory=properties.total_memory / GIB), f"this machine's GPU: {properties.name}"
    else:
        sheet, source = GPUS[ASSUMED_GPU], f"no GPU on this machine: an {ASSUMED_GPU} is assumed (--gpu)"
    given = {name: value for name in ("memory", "tflops", "bandwidth") if (value := getattr(options, name))}
    sheet = replace(sheet, **given)
    speeds = f"{sheet.memory:g} GiB, {sheet.tflops:g} TFLOP/s in {sheet.dtype} and {sheet.bandwidth:g} TB/s per GPU"
    return sheet, (source, speeds)


def _cpu(options: DeviceOptions) -> tuple[DataSheet, tuple[str, ...]]:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0))
    tflops, bandwidth = options.tflops or cores * CPU_CORE[0], options.bandwidth or cores * CPU_CORE[1]
    memory = (
        f"{options.memory:g} GiB of memory (--memory)" if options.memory else f"this machine's {ram:.1f} GiB of memory"
    )
    return DataSheet(options.memory or ram, tflops, bandwidth, BETWEEN_PROCESSES), (
        f"a CPU with {memory}; hardware.device=cuda plans for GPUs",
        f"{tflops:g} TFLOP/s in bfloat16 and {bandwidth:g} TB/s for {cores} cores: a guess (--tflops, --bandwidth)",
    )
