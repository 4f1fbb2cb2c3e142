"""The checks of a machine, in the order of the report."""

from __future__ import annotations

from grpocli_tools.doctor import devices, engines, resources, software, surroundings
from grpocli_tools.doctor.checkup import MachineCheck

PROBES = devices.TORCH_SECONDS + devices.NCCL_SECONDS + 3 * devices.SMI_SECONDS
"""Seconds of the checks that wait for the probes; each probe has its own deadline."""

MACHINE = (
    MachineCheck("software", "Python", software.python),
    MachineCheck("software", "packages", software.packages, 20.0),
    MachineCheck("software", "optional", software.chosen),
    MachineCheck("software", "torch", devices.torch, PROBES),
    MachineCheck("software", "vLLM", engines.vllm, engines.VLLM_SECONDS + 10),
    MachineCheck("GPUs", "GPUs", devices.gpus, PROBES),
    MachineCheck("GPUs", "NCCL", devices.nccl, PROBES),
    MachineCheck("machine", "cores", resources.cores),
    MachineCheck("machine", "memory", resources.memory),
    MachineCheck("machine", "/dev/shm", resources.shared_memory),
    MachineCheck("machine", "limits", resources.limits),
    MachineCheck("machine", "sandbox", engines.sandbox, engines.SANDBOX_SECONDS + 5),
    MachineCheck("disk", "disk", resources.disk, 10.0),
    MachineCheck("network", "hub", surroundings.hub, 10.0),
    MachineCheck("network", "loopback", surroundings.ports),
    MachineCheck("network", "SLURM", surroundings.slurm, surroundings.SLURM_SECONDS + 2),
    MachineCheck("environment", "text", surroundings.locale, 10.0),
)
