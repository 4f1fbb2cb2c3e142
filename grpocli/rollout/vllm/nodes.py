"""Servers on other machines than the trainer's: what they and the first training machine tell each other by files.

The run's folder is on a file system that all of them share. Its `engine/` holds, as on one machine, the address of each
server; who has failed to start one says so beside them; and `engine/over` says that the run is.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import EngineError, GrpoError
from grpocli.files import read_shared, write_atomic
from grpocli.processes.exit_reports import KINDS
from grpocli.rollout.vllm.endpoint import run_files

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import VllmOptions
    from grpocli.rollout.vllm.supervisor import Watched

POLL = 0.5
ARRIVE = 300.0
"""Seconds by which the machines of a job may begin one after the other."""


def weights_of(run_dir: Path) -> Path:
    """Where servers on other machines read weights from, with sync=shm."""
    return run_dir.absolute() / "engine" / "weights"


def new_folder(run_dir: Path) -> None:
    """An empty one, before the other machines are told of the run: what a session before left is gone.

    But for what another machine has open: NFS keeps that under another name, and its folder too.
    """
    folder = run_dir / "engine"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def over_file(run_dir: Path) -> Path:
    """Its existence ends the other machines' servers, and tells the batch script that this is as it should be."""
    return run_dir / "engine" / "over"


def failed_file(run_dir: Path, index: int) -> Path:
    return run_dir / "engine" / f"failed_{index}.json"


@contextlib.contextmanager
def servers_elsewhere(options: VllmOptions, job: EngineJob) -> Iterator[None]:
    """Wait until every server on the other machines answers; when the block ends they end, and their keys are removed.

    Raises the error of one that could not be started, EngineError after `engine.start_timeout`.
    """
    wanted = job.nodes * options.replicas
    deadline = time.monotonic() + options.start_timeout + ARRIVE
    try:
        while len(run_files(job.run_dir)) < wanted:
            if error := _failed(job.run_dir):
                raise error
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(run_files(job.run_dir))} of {wanted} vLLM servers on {job.nodes} machines answer after "
                    f"{options.start_timeout + ARRIVE:g} s (engine.start_timeout={options.start_timeout}); see "
                    f"{job.run_dir / 'logs'}/vllm_N.log"
                )
            time.sleep(POLL)
        yield
    finally:
        new_folder(job.run_dir)
        over_file(job.run_dir).touch()


def _failed(run_dir: Path) -> GrpoError | None:
    for path in sorted((run_dir / "engine").glob("failed_*.json")):
        said = json.loads(read_shared(path))
        return KINDS.get(said["code"], EngineError)(said["message"])
    return None


def report(run_dir: Path, index: int, error: GrpoError) -> None:
    """Of a machine whose servers cannot be started, for the first training machine."""
    message = f"{socket.gethostname()}: {error}"
    with contextlib.suppress(FileNotFoundError):  # the run is over: nobody listens
        write_atomic(failed_file(run_dir, index), json.dumps({"code": error.exit_code, "message": message}))


def serve_until_over(watched: Sequence[Watched], run_dir: Path, over: threading.Event) -> None:
    """Return when the run is over or `over` is set; servers that die meanwhile are started again."""
    for one in watched:
        one.watch()
    while not over_file(run_dir).exists() and not over.wait(POLL):
        pass
