"""What a run needs of a machine: this decides whether a finding is an error or a warning."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20
GIB = 2**30
LEAST_DISK = 200 * MIB
"""Bytes that the default run may write: the built-in model, two checkpoints, rollouts."""


@dataclass(frozen=True, slots=True)
class Module:
    """A package that a choice of the config needs. key: the choice. install: the command that installs it."""

    module: str
    key: str
    install: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs; the defaults are those of `grpocli train` without overrides.

    vllm, cuda, hub, slurm, sandbox, shared_memory: the choice that needs it, such as "engine=vllm"; "" if none does.
    gpus: the number of GPUs on this machine. python: the interpreter of the sandbox; None: this one.
    modules: the packages that choices of the config need. runs: the folder that the run's folder is in; None: runs/ in
    the working folder.
    """

    vllm: str = ""
    cuda: str = ""
    hub: str = ""
    slurm: str = ""
    sandbox: str = ""
    shared_memory: str = ""
    gpus: int = 0
    python: str | None = None
    modules: tuple[Module, ...] = field(default=())
    runs: Path | None = None
