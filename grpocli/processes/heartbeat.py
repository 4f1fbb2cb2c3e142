"""Where every trainer process is, for the one that started them: `logs/place_N.json`."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from grpocli.files import read_shared
from grpocli.processes.node import in_name, session

DONE = "done"
"""The stage of a process that ended as it should."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a process is doing. since: when it began to, in seconds since the epoch. step: the one it is working on.

    session: `Node.session`, "" outside of a job.
    """

    rank: int
    pid: int
    host: str
    stage: str
    step: int
    since: float
    session: str = ""

    @property
    def here(self) -> bool:
        """Whether it is on this machine, so that its pid means something."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        where = "" if self.here else f" on {self.host}"
        return f"process {self.rank}{where} (pid {self.pid})"


class Board:
    """A process's own place. A stage lasts until its thread enters another; that of the main thread is shown first."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path, self._rank, self.step = place_file(run_dir, rank), rank, 0
        self._path.parent.mkdir(exist_ok=True)
        self._stages: dict[int, str] = {threading.main_thread().ident or 0: "start"}
        self._writing = threading.Lock()

    def enter(self, stage: str) -> None:
        """Renamed into place, not fsynced: nobody needs it after a crash of the machine."""
        with self._writing:
            self._stages[threading.get_ident()] = stage
            shown = stage if stage == DONE else " beside ".join(self._stages.values())
            place = Place(self._rank, os.getpid(), socket.gethostname(), shown, self.step, time.time(), session())
            beside = self._path.with_name(f".tmp-{self._path.name}")
            beside.write_text(json.dumps(asdict(place)))
            beside.replace(self._path)


def place_file(run_dir: Path, rank: int) -> Path:
    """Of this session: one that is over cannot write over it."""
    return run_dir / "logs" / f"place_{in_name()}{rank}.json"


def places(run_dir: Path) -> list[Place]:
    """Of all processes of this session that have said where they are, in the order of their ranks.

    A machine that was cut off from the others may still be writing for a session that is over.
    """
    found = [Place(**json.loads(read_shared(path))) for path in (run_dir / "logs").glob("place_*.json")]
    return sorted((place for place in found if place.session == session()), key=lambda place: place.rank)
