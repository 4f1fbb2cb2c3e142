"""This machine's place in a job of several, as SLURM and the batch script set it."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
