"""engine=vllm before trainer processes exist: start the run's own servers, or check those at `engine.base_url`.

The launching process leaves each server's address and key in the run folder (`server_files.py`). With rollout nodes
the servers run on other machines (`grpocli.launch.rollout_node`), which share the run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import EngineError, GrpoError
from grpocli.files import read_shared, write_atomic
from grpocli.processes.exit_reports import KINDS
from grpocli.processes.guard import guarded
from grpocli.progress import unreported
from grpocli.rollout.vllm.external_server import external_servers
from grpocli.rollout.vllm.server import LOOPBACK, ServerSpec, free_port, serving
from grpocli.rollout.vllm.server_files import (
    SHM,
    Endpoint,
    failed_file,
    new_engine_folder,
    over_file,
    private_folder,
    run_file,
    run_files,
    shared_memory_patterns,
)
from grpocli.rollout.vllm.supervisor import SupervisedServer
from grpocli.rollout.vllm.validate import check_room
from grpocli.rollout.vllm.weight_verifier import PROBE_ROOM

if TYPE_CHECKING:
    from grpocli.processes.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import VllmOptions

PORT_TRIES = 3
OUTLIVE = 15.0  # seconds after this process's death within which servers and trainer processes have ended too
POLL = 0.5  # seconds between checks of the run folder
ARRIVE = 300.0  # seconds within which all machines of a job begin


@contextlib.contextmanager
def launch(options: VllmOptions, job: EngineJob) -> Iterator[None]:
    """Provide servers for the trainer processes until the block ends; own servers are restarted when they die."""
    if job.nodes:
        with servers_on_rollout_nodes(options, job):
            yield
        return
    folder = run_file(job.run_dir).parent
    shutil.rmtree(folder, ignore_errors=True)  # a killed run may have left it
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if options.base_url:
            for index, endpoint in enumerate(external_servers(options, job)):
                endpoint.save(run_file(job.run_dir, index))
        else:
            for server in stack.enter_context(own_servers(options, job, threading.Event())):
                server.supervise()
        yield


@contextlib.contextmanager
def own_servers(
    options: VllmOptions, job: EngineJob, stop_event: threading.Event, host: str = LOOPBACK, first: int = 0
) -> Iterator[list[SupervisedServer]]:
    """Healthy servers on this machine, with `job.gpus`, numbered from `first` on.

    They start concurrently. stop_event: ends a start under way.
    Raises ConfigError or EngineError if one cannot be started.
    """
    with contextlib.ExitStack() as stack:
        folder = job.sync_folder or str(stack.enter_context(_weights_folder()))
        job = dataclasses.replace(job, sync_folder=folder)
        servers = []
        for i, gpus in enumerate(gpu_slices(options, job.gpus)):
            start = _ServerStart(options, job, i, gpus, stop_event, host)
            servers.append(SupervisedServer(first + i, job.run_dir, start, stop_event, options.max_restarts))
        stack.callback(_stop, servers, stop_event)
        with ThreadPoolExecutor(len(servers)) as pool:
            try:
                for done in as_completed([pool.submit(server.start) for server in servers]):
                    done.result()
            except BaseException:
                stop_event.set()  # otherwise the pool would wait for the other starts
                raise
        yield servers


def _stop(servers: Sequence[SupervisedServer], stop_event: threading.Event) -> None:
    stop_event.set()
    with ThreadPoolExecutor(len(servers)) as pool:
        for stopped in [pool.submit(server.stop) for server in servers]:
            stopped.result()


@contextlib.contextmanager
def _weights_folder() -> Iterator[Path]:
    """A folder for weights that outlives any single server; a guard removes it if this process is killed."""
    # the shell ignores TERM, so that its guard waits before it removes files that others may still write
    command = ["sh", "-c", "trap '' TERM; exec sleep 2147483647"]
    with private_folder() as folder, contextlib.ExitStack() as stack:
        pieces = [f"{SHM}/{pattern}" for pattern in shared_memory_patterns(folder.path)]
        remove: list[Path | str] = [*pieces, folder.path]
        keeper = stack.enter_context(guarded(command, name="weights", remove=remove, hold=[folder.lock], grace=OUTLIVE))
        try:
            yield folder.path
        finally:
            keeper.stop(0)


@dataclass(frozen=True, slots=True)
class _ServerStart:
    """Starts server number `index` of this machine, for `SupervisedServer`."""

    options: VllmOptions
    job: EngineJob
    index: int
    gpus: str | None
    stop_event: threading.Event
    host: str

    @contextlib.contextmanager
    def __call__(self, restarts: int) -> Iterator[tuple[Endpoint, Guarded]]:
        """A restart takes a new port, so that requests to the dead server cannot reach one with other weights.

        Another process may take a free port before the server listens on it; then another port is tried.
        """
        fixed = self.options.port + self.index if self.options.port and not restarts else 0
        with contextlib.ExitStack() as stack:
            yield self._enter(stack, fixed, tries=1 if fixed else PORT_TRIES)

    def _enter(self, stack: contextlib.ExitStack, fixed: int, tries: int) -> tuple[Endpoint, Guarded]:
        spec = own_spec(self.options, self.job, fixed or free_port(), self.gpus, self.host)
        machine = "" if self.host == LOOPBACK else f"{self.host}_"
        log = self.job.run_dir.absolute() / "logs" / f"vllm_{machine}{self.index}.log"
        try:
            progress = unreported if self.index else self.job.progress  # the first server's progress is shown
            return stack.enter_context(serving(spec, self.options, log, self.stop_event, progress=progress))
        except GrpoError as error:
            if tries == 1 or "Address already in use" not in str(error):
                raise
        return self._enter(stack, fixed, tries - 1)


def own_spec(options: VllmOptions, job: EngineJob, port: int, gpus: str | None, host: str = LOOPBACK) -> ServerSpec:
    """The spec of one of the run's own servers. Raises ConfigError if `max_model_len` is too small for the run."""
    check_room(options.max_model_len, job)
    room = options.max_model_len or max(job.max_tokens, PROBE_ROOM)
    return ServerSpec(job, port, room, host, gpus=gpus)


def gpu_slices(options: VllmOptions, gpus: Sequence[str]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each replica, out of `gpus`; None for each if there are none."""
    each = options.tensor_parallel * options.data_parallel
    if not gpus:
        return [None] * options.replicas
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(options.replicas)]


@contextlib.contextmanager
def servers_on_rollout_nodes(options: VllmOptions, job: EngineJob) -> Iterator[None]:
    """Wait until every server on the rollout nodes answers; end the servers and remove their keys after the block.

    Raises the error of a server that cannot be started, or EngineError after `engine.start_timeout`.
    """
    wanted = job.nodes * options.replicas
    deadline = time.monotonic() + options.start_timeout + ARRIVE
    try:
        while len(run_files(job.run_dir)) < wanted:
            if error := _reported_failure(job.run_dir):
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
        new_engine_folder(job.run_dir)
        over_file(job.run_dir).touch()


def _reported_failure(run_dir: Path) -> GrpoError | None:
    for path in sorted((run_dir / "engine").glob("failed_*.json")):
        report = json.loads(read_shared(path))
        return KINDS.get(report["code"], EngineError)(report["message"])
    return None


def report_failure(run_dir: Path, index: int, error: GrpoError) -> None:
    """On a rollout node whose servers cannot be started, report the error to the first training machine."""
    message = f"{socket.gethostname()}: {error}"
    with contextlib.suppress(FileNotFoundError):  # the run is over
        write_atomic(failed_file(run_dir, index), json.dumps({"code": error.exit_code, "message": message}))


def serve_until_over(servers: Sequence[SupervisedServer], run_dir: Path, stop_event: threading.Event) -> None:
    """On a rollout node, supervise servers until the run is over or `stop_event` is set."""
    for server in servers:
        server.supervise()
    while not over_file(run_dir).exists() and not stop_event.wait(POLL):
        pass
