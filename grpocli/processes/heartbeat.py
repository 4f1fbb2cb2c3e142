"""Heartbeats: each trainer process writes its stage to `logs/rank_N.json`, and the launching process reads them all."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from grpocli.files import read_shared
from grpocli.processes.node import file_prefix, session

DONE = "done"
"""The stage of a process that ended normally."""
JOINING = "joining"
"""The stage of a process that waits for the others to form their group, and for their first collective call."""
START = "start"
"""The stage of a process that loads the model, or begins a step."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The stage of a process. since: when the stage began, in seconds since the epoch. step: the current step.

    session: `Node.session`, "" outside of a SLURM job.
    """

    rank: int
    pid: int
    host: str
    stage: str
    step: int
    since: float
    session: str = ""

    @property
    def begun(self) -> bool:
        """Whether the process has begun to sample, evaluate or train."""
        return self.step > 0 or self.stage not in (JOINING, START)

    @property
    def here(self) -> bool:
        """Whether the process is on this machine, so that its pid is valid here."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        where = "" if self.here else f" on {self.host}"
        return f"process {self.rank}{where} (pid {self.pid})"


class HeartbeatWriter:
    """Writes this process's heartbeat. Each thread has a stage; the main thread's is shown first."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path, self._rank, self.step = heartbeat_file(run_dir, rank), rank, 0
        self._path.parent.mkdir(exist_ok=True)
        self._stages: dict[int, str] = {threading.main_thread().ident or 0: START}
        self._writing = threading.Lock()

    def enter(self, stage: str) -> None:
        """Write the stage that this thread enters. The file is renamed into place, but not fsynced."""
        with self._writing:
            self._stages[threading.get_ident()] = stage
            shown = stage if stage == DONE else " beside ".join(self._stages.values())
            beat = Heartbeat(self._rank, os.getpid(), socket.gethostname(), shown, self.step, time.time(), session())
            beside = self._path.with_name(f".tmp-{self._path.name}")
            beside.write_text(json.dumps(asdict(beat)))
            beside.replace(self._path)


def heartbeat_file(run_dir: Path, rank: int) -> Path:
    """The file of a rank. Its name has the session, so that a process of an earlier session cannot overwrite it."""
    return run_dir / "logs" / f"rank_{file_prefix()}{rank}.json"


def heartbeats(run_dir: Path) -> list[Heartbeat]:
    """The heartbeats of this session, by rank.

    Those of earlier sessions are left out: a machine that lost its connection may still be writing them.
    """
    found = [Heartbeat(**json.loads(read_shared(path))) for path in (run_dir / "logs").glob("rank_*.json")]
    return sorted((beat for beat in found if beat.session == session()), key=lambda beat: beat.rank)
