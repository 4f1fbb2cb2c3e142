"""What went wrong in trainer processes, told through files: exit codes and messages do not pass accelerate's launcher.

The process that fails first is seldom the first to say so: the others lose their connection to it, and one that hangs
says nothing at all. `verdict` finds it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpocli.errors import ConfigError, GrpoError, RunError, Stopped
from grpocli.files import read_shared, write_atomic
from grpocli.processes.heartbeat import DONE, Place
from grpocli.processes.node import in_name, session

LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket timeout|timed out waiting|no route to host|nccl|gloo",
    re.IGNORECASE,
)
"""In what torch says where another process is gone or does not answer."""
KINDS: dict[int, type[GrpoError]] = {2: ConfigError, 3: Stopped}


@dataclass(frozen=True, slots=True)
class Failure:
    """Of process `rank`, at `time` (seconds since the epoch). code: what the run would exit with.

    lost: it fails because another process is gone or does not answer. session: as of a `Place`.
    """

    time: float
    rank: int
    code: int
    message: str
    lost: bool = False
    session: str = ""

    @property
    def error(self) -> GrpoError:
        return KINDS.get(self.code, RunError)(self.message)


def failure_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"failure_{in_name()}{rank}.json"


def report_failure(run_dir: Path, rank: int, error: GrpoError, lost: bool = False) -> None:
    """Leave an error for the launching process; what a process has said first in a session counts."""
    path = failure_file(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        failure = Failure(time.time(), rank, error.exit_code, str(error), lost, session())
        write_atomic(path, json.dumps(asdict(failure)))


def failures(run_dir: Path) -> list[Failure]:
    """Of all processes of this session, the first one first."""
    found = [Failure(**json.loads(read_shared(path))) for path in (run_dir / "logs").glob("failure_*.json")]
    return sorted((failure for failure in found if failure.session == session()), key=lambda failure: failure.time)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another process is gone or does not answer."""
    import torch.distributed

    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and bool(LOST.search(str(error)))


def verdict(
    failed: Sequence[Failure], dead: Sequence[Place], living: Sequence[Place], timeout: int
) -> GrpoError | None:
    """The error that began it; None where nothing is wrong.

    dead: processes that are gone without a word; living: those that have not failed. timeout: seconds that one waits
    for the others.
    """
    now = time.time()
    own = [failure for failure in failed if not failure.lost]
    if own:
        return own[0].error
    if not failed and not dead:
        return None
    # a process that has waited as long as it may has lost nobody: another one did not come
    waited = any(now - place.since >= timeout for place in dead)
    waited = waited or any("timed out" in failure.message.lower() for failure in failed)
    behind = min(living, key=lambda place: (place.step, place.since), default=None)
    if waited and behind and behind.stage != DONE:
        return RunError(
            f"{behind} did not come within hardware.timeout={timeout} s: it has been at {_where(behind)} for "
            f"{now - behind.since:.0f} s; its own words are in logs/rank_{behind.rank}.log"
        )
    if dead:
        first = min(dead, key=lambda place: place.since)
        return RunError(
            f"{first} ended without a word at {_where(first)}: it was killed, perhaps by the kernel for lack of memory "
            f"(see dmesg, and logs/rank_{first.rank}.log)"
        )
    return failed[0].error


def _where(place: Place) -> str:
    return f"{place.stage!r} of step {place.step}"
