"""The checks of a machine, in the order of the report."""

from __future__ import annotations

from grpocli_tools.doctor import devices, resources, software, surroundings
from grpocli_tools.doctor.checkup import MachineCheck
from grpocli_tools.doctor.machine import PROBES

MACHINE = (
    MachineCheck("software", "Python", software.python),
    MachineCheck("software", "packages", software.packages),
    MachineCheck("software", "optional", software.chosen),
    MachineCheck("software", "torch", devices.torch, PROBES),
    MachineCheck("software", "vLLM", software.vllm, PROBES),
    MachineCheck("GPUs", "GPUs", devices.gpus, PROBES),
    MachineCheck("GPUs", "NCCL", devices.nccl, PROBES),
    MachineCheck("machine", "cores", resources.cores),
    MachineCheck("machine", "memory", resources.memory),
    MachineCheck("machine", "/dev/shm", resources.shared_memory),
    MachineCheck("machine", "limits", resources.limits),
    MachineCheck("machine", "sandbox", software.sandbox, PROBES),
    MachineCheck("disk", "disk", resources.disk),
    MachineCheck("network", "hub", surroundings.hub),
    MachineCheck("network", "loopback", surroundings.ports),
    MachineCheck("network", "SLURM", surroundings.slurm),
    MachineCheck("environment", "text", surroundings.locale),
)
