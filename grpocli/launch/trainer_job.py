"""`job.json` in the run's folder: the input of trainer processes, written by the launching process."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from grpocli.errors import RunError
from grpocli.files import read_shared, write_atomic
from grpocli.rollout.engine import EngineJob

NAME = "job.json"
POLL = 0.5  # seconds between checks for a file on a shared file system


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """A trainer process's input beside the config.

    engine: how the engine was launched. checkpoint: where to resume (None: start from the beginning). On several
    machines, session: `Node.session`; ready: whether the engine accepts connections.
    """

    engine: EngineJob
    checkpoint: Path | None
    session: str = ""
    ready: bool = True

    def save(self, run_dir: Path) -> None:
        values = asdict(self)
        del values["engine"]["progress"]  # a callback of this process
        write_atomic(run_dir / NAME, json.dumps(values, indent=2, default=str))

    @classmethod
    def load(cls, run_dir: Path) -> TrainerJob:
        values = json.loads(read_shared(run_dir / NAME))
        engine = values["engine"]
        at = values["checkpoint"]
        at = Path(at) if at else None
        job = EngineJob(**engine | {"run_dir": Path(engine["run_dir"]), "gpus": tuple(engine["gpus"])})
        return cls(job, at, values["session"], values["ready"])


def wait_for_job(
    run_dir: Path, session: str, timeout: float, ready: bool = True, give_up: threading.Event | None = None
) -> TrainerJob | None:
    """The job that the first machine of this session writes; None once `give_up` is set.

    Raises RunError if there is none within `timeout` seconds.
    """
    until, give_up = time.monotonic() + timeout, give_up or threading.Event()
    while time.monotonic() < until:
        if (run_dir / NAME).exists():
            job = TrainerJob.load(run_dir)
            if job.session == session and (job.ready or not ready):
                return job
        if give_up.wait(POLL):
            return None
    what = "started its engine" if ready else "written the job's description"
    raise RunError(f"the first training machine has not {what} within {timeout:g} s: {run_dir / NAME}")
