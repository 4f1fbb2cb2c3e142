"""The checks of a machine, in the order of the report."""

from __future__ import annotations

from grpocli.doctor import devices, engines, resources, software, surroundings
from grpocli.doctor.checkup import Check

PROBES = devices.TORCH_SECONDS + devices.NCCL_SECONDS + 3 * devices.SMI_SECONDS
"""Seconds of the checks that wait for the probes; each probe has a deadline of its own."""

MACHINE = (
    Check("software", "Python", software.python),
    Check("software", "packages", software.packages, 20.0),
    Check("software", "optional", software.chosen),
    Check("software", "torch", devices.torch, PROBES),
    Check("software", "vLLM", engines.vllm, engines.VLLM_SECONDS + 10),
    Check("GPUs", "GPUs", devices.gpus, PROBES),
    Check("GPUs", "NCCL", devices.nccl, PROBES),
    Check("machine", "cores", resources.cores),
    Check("machine", "memory", resources.memory),
    Check("machine", "/dev/shm", resources.shared_memory),
    Check("machine", "limits", resources.limits),
    Check("machine", "sandbox", engines.sandbox, engines.SANDBOX_SECONDS + 5),
    Check("disk", "disk", resources.disk, 10.0),
    Check("network", "hub", surroundings.hub, 10.0),
    Check("network", "loopback", surroundings.ports),
    Check("network", "SLURM", surroundings.slurm, surroundings.SLURM_SECONDS + 2),
    Check("environment", "text", surroundings.locale, 10.0),
    Check("environment", "clock", surroundings.clock),
    Check("environment", "variables", surroundings.variables, 15.0),
)
