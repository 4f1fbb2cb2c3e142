"""This machine's place in a job of several, as SLURM and the batch script tell it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from grpocli.errors import ConfigError
from grpocli.hardware.hardware import Hardware, Multinode


@dataclass(frozen=True, slots=True)
class Node:
    """One of `count` machines of a job step, each with one process like this one.

    master, port: where the first trainer process of the run listens for the others. session: of the whole job, another
    one after each requeue, so that nobody takes what an earlier session left for this one's.
    """

    rank: int
    count: int
    session: str
    master: str = ""
    port: int = 0

    @classmethod
    def here(cls) -> Node | None:
        """None outside of a job step."""
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
    """`Node.session` of this process; empty outside of a job."""
    node = Node.here()
    return node.session if node else ""


def in_name() -> str:
    """A session's part of a file's name."""
    return f"{session()}_" if session() else ""


def node_of(hardware: Hardware) -> Node | None:
    """This machine's place; None for a run on one machine.

    Raises ConfigError where a run on several has no allocation.
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
