"""What trainer processes report in the folder `logs`: their stage (heartbeats), and the error that ended them.

Files, because exit codes and messages get lost in accelerate's launcher. The first process to report an error is seldom
the cause: others lose their connection to a process that died, and a process that hangs reports nothing. So
`root_cause` compares the reports with the heartbeats.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpocli.errors import ConfigError, GrpoError, RunError, Stopped
from grpocli.files import read_shared, write_atomic
from grpocli.processes.node import file_prefix, session

DONE = "done"
"""The stage of a process that ended normally."""
JOINING = "joining"
"""The stage of a process that waits for the others to form their group, and for their first collective call."""
START = "start"
"""The stage of a process that loads the model, or begins a step."""
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket timeout|timed out waiting|no route to host|nccl|gloo",
    re.IGNORECASE,
)
"""Messages of torch about a peer that died or does not answer; torch has no error class for these with gloo."""
KINDS: dict[int, type[GrpoError]] = {2: ConfigError, 3: Stopped}
"""Error classes by exit code; a RunError has any other code."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The stage of a process."""

    rank: int
    pid: int
    host: str
    stage: str
    step: int
    since: float
    """When the stage began, in seconds since the epoch."""
    session: str = ""
    """`Node.session`, "" outside of a SLURM job."""

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


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The error of process `rank` at `time` (seconds since the epoch). code: the exit code of the run.

    lost_peer: whether the error is that another process died or does not answer. session: as in `Heartbeat`.
    """

    time: float
    rank: int
    code: int
    message: str
    lost_peer: bool = False
    session: str = ""

    @property
    def error(self) -> GrpoError:
        return KINDS.get(self.code, RunError)(self.message)


def report_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"failure_{file_prefix()}{rank}.json"


def report_failure(run_dir: Path, rank: int, error: GrpoError, lost_peer: bool = False) -> None:
    """Write the error of a process for the launching process. Only the first report of a session counts."""
    path = report_file(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        report = ExitReport(time.time(), rank, error.exit_code, str(error), lost_peer, session())
        write_atomic(path, json.dumps(asdict(report)))


def exit_reports(run_dir: Path) -> list[ExitReport]:
    """The reports of this session, oldest first."""
    found = [ExitReport(**json.loads(read_shared(path))) for path in (run_dir / "logs").glob("failure_*.json")]
    return sorted((report for report in found if report.session == session()), key=lambda report: report.time)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error means that another process died or does not answer."""
    import torch.distributed

    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and bool(LOST_PEER.search(str(error)))


def root_cause(
    reports: Sequence[ExitReport], dead: Sequence[Heartbeat], living: Sequence[Heartbeat], timeout: int
) -> GrpoError | None:
    """The error that made the run fail; None if nothing is wrong.

    dead: processes that ended without a report; living: those that have not failed. timeout: seconds that a process
    waits for the others.
    """
    if own := [report for report in reports if not report.lost_peer]:
        return own[0].error
    if not reports and not dead:
        return None
    if hanging := _hanging(reports, dead, living, timeout):
        return RunError(
            f"{hanging} did not arrive within hardware.timeout={timeout} s: it has been at {_position(hanging)} for "
            f"{time.time() - hanging.since:.0f} s; its log is logs/rank_{hanging.rank}.log"
        )
    if dead:
        first = min(dead, key=lambda beat: beat.since)
        return RunError(
            f"{first} ended without an error message at {_position(first)}: it was killed, perhaps by the kernel for "
            f"lack of memory (see dmesg, and logs/rank_{first.rank}.log)"
        )
    return reports[0].error


def _hanging(
    reports: Sequence[ExitReport], dead: Sequence[Heartbeat], living: Sequence[Heartbeat], timeout: int
) -> Heartbeat | None:
    """The process that the others waited for until the timeout; None if no wait timed out."""
    # a dead process may have waited too long: NCCL's watchdog aborts it then
    timed_out = any(time.time() - beat.since >= timeout for beat in dead)
    timed_out = timed_out or any("timed out" in report.message.lower() for report in reports)
    behind = min(living, key=lambda beat: (beat.step, beat.since), default=None)
    return behind if timed_out and behind and behind.stage != DONE else None


def _position(beat: Heartbeat) -> str:
    return f"{beat.stage!r} of step {beat.step}"
