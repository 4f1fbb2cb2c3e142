"""This machine's place in a SLURM job step, read from the variables that SLURM and the batch script set."""

from __future__ import annotations

import os
from dataclasses import dataclass

from grpocli.errors import ConfigError

GROUP_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Variables by which a launcher (torchrun, accelerate, MPI) makes a process one of a group."""


def leave_group() -> None:
    """Forget a group's variables that are left over in a shell. Raises ConfigError below torchrun."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and processes != "1":
        hint = "start it once, without torchrun or accelerate launch"
        raise ConfigError("grpocli starts them itself", key="hardware.processes", value=processes, hint=hint)
    for name in GROUP_VARIABLES:
        os.environ.pop(name, None)


@dataclass(frozen=True, slots=True)
class Node:
    """One of `count` machines of a job step, each with one process like this one.

    master, port: the address at which the run's first trainer process listens. session: identifies this start of the
    job; a requeue gets another one, so that files of an earlier session are not taken for current ones.
    """

    rank: int
    count: int
    session: str
    master: str = ""
    port: int = 0

    @classmethod
    def here(cls) -> Node | None:
        """This machine's node; None outside of a job step."""
        env = os.environ
        if not {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS"} <= env.keys():
            return None
        return cls(
            rank=int(env["SLURM_PROCID"]),
            count=int(env["SLURM_NTASKS"]),
            session=f"{env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}",
            master=env.get("MASTER_ADDR", ""),
            port=int(env.get("MASTER_PORT", "0")),
        )


def session() -> str:
    """`Node.session` of this process; "" outside of a job step."""
    node = Node.here()
    return node.session if node else ""


def file_prefix() -> str:
    """The session as the beginning of a file's name; "" outside of a job step."""
    return f"{session()}_" if session() else ""
