"""The servers of a run: started or found before trainer processes exist, and replaced when they are lost.

The process that launched the run starts its servers, or checks those at `engine.base_url` (`launch`), and supervises
its own (`SupervisedServer`). Rollout nodes serve on other machines (`grpocli.launch.rollout_node`). Trainer processes
wait for a lost server (`reconnect`). All communicate through files in the run folder (`server_files.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError, EngineError, EngineGone, GrpoError
from grpocli.files import read_shared, write_atomic
from grpocli.processes.guard import guarded
from grpocli.processes.reports import KINDS
from grpocli.processes.threads import run_in_thread
from grpocli.progress import unreported
from grpocli.rollout.vllm.external import external_server
from grpocli.rollout.vllm.server import LOOPBACK, ServerSpec, free_port, serving
from grpocli.rollout.vllm.server_files import (
    POLL,
    SHM,
    Endpoint,
    failed_file,
    lost_file,
    new_engine_folder,
    over_file,
    private_folder,
    run_file,
    run_files,
    shared_memory_patterns,
)
from grpocli.rollout.vllm.weight_sync import PROBE_ROOM

if TYPE_CHECKING:
    from grpocli.processes.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import VllmOptions

logger = logging.getLogger(__name__)

OUTLIVE = 15.0  # seconds after this process's death within which servers and trainer processes have ended too
GRACE = 2.0  # seconds that a lost server has to exit
ARRIVE = 300.0  # seconds within which all machines of a job begin

StartServer = Callable[[], AbstractContextManager[tuple[Endpoint, "Guarded"]]]
Lost = Mapping[int, tuple[Endpoint, str]]
"""The former endpoint of each lost server, by number, and the reason why it is lost."""


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
            for index, url in enumerate(options.urls):
                external_server(options, url, job).save(run_file(job.run_dir, index))
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
        job = replace(job, sync_folder=folder)
        servers = []
        for i, gpus in enumerate(gpu_slices(options, job.gpus)):
            start = partial(_serving, options, job, i, gpus, stop_event, host)
            servers.append(SupervisedServer(first + i, job.run_dir, start, stop_event, options.max_restarts))
        stack.callback(_stop, servers, stop_event)
        for done in as_completed([server.begin() for server in servers]):
            done.result()
        yield servers


def _stop(servers: Sequence[SupervisedServer], stop_event: threading.Event) -> None:
    """End the servers, and starts under way."""
    stop_event.set()
    stopping = [run_in_thread(server.stop, server.name) for server in servers]
    for stopped in wait(stopping).done:
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
        stack.callback(keeper.stop, 0)
        yield folder.path


def _serving(
    options: VllmOptions, job: EngineJob, index: int, gpus: str | None, stop_event: threading.Event, host: str
) -> AbstractContextManager[tuple[Endpoint, Guarded]]:
    """Server number `index` of this machine, while the block runs.

    Each has a new port, so that requests to a dead server cannot reach one with other weights.
    """
    options.check_room(job)
    room = options.max_model_len or max(job.max_tokens, PROBE_ROOM)
    machine = "" if host == LOOPBACK else f"{host}_"
    log = job.run_dir.absolute() / "logs" / f"vllm_{machine}{index}.log"
    progress = unreported if index else job.progress  # the first server's progress is shown
    return serving(ServerSpec(job, free_port(), room, host, gpus), options, log, stop_event, progress=progress)


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
                count, waited = (
                    len(run_files(job.run_dir)),
                    f"{options.start_timeout + ARRIVE:g} s (engine.start_timeout)",
                )
                problem = f"{count} of {wanted} vLLM servers on {job.nodes} machines answer after {waited}"
                raise EngineError(f"{problem}; see {job.run_dir / 'logs'}/vllm_N.log")
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


class SupervisedServer:
    """Number `index` of the run's own servers, restarted in a thread of the launching process when it is lost."""

    def __init__(
        self, index: int, run_dir: Path, start_server: StartServer, stop_event: threading.Event, max_restarts: int
    ) -> None:
        """start_server: starts a server as a context. stop_event: set when the run ends."""
        self.index, self.run_dir, self.stop_event, self.max_restarts = index, run_dir, stop_event, max_restarts
        self.name = f"vLLM server {index}"
        self._start_server = start_server
        self._running = contextlib.ExitStack()
        self._work: Future[None] | None = None  # in a thread
        self.attempts = 0
        """Restarts tried so far, failed ones included."""

    def begin(self) -> Future[None]:
        """`start` in a thread."""
        self._work = run_in_thread(self.start, self.name)
        return self._work

    def start(self) -> None:
        """Return when the server is healthy and its endpoint file written. Raises ConfigError or EngineError."""
        self.endpoint, self.process = self._running.enter_context(self._start_server())
        self.endpoint = replace(self.endpoint, generation=self.attempts)
        self.endpoint.save(run_file(self.run_dir, self.index))

    def supervise(self) -> None:
        """Restart the server when it is lost, in a thread, until `stop`."""
        self._work = run_in_thread(self._supervise, self.name)

    def stop(self) -> None:
        """End the server; `stop_event` must be set, which ends a start under way too."""
        if self._work:
            wait([self._work])
        self._running.close()
        for path in (run_file(self.run_dir, self.index), lost_file(self.run_dir, self.index)):
            path.unlink(missing_ok=True)

    def _supervise(self) -> None:
        while not self.stop_event.wait(POLL):
            if (reason := self._failure()) and not self._restart(reason):
                return

    def _failure(self) -> str | None:
        """The reason why the server is lost: its process has ended, or a trainer reports it."""
        if (code := self.process.poll()) is not None:
            return f"{self.name} ended with exit code {code}{self.endpoint.cause()}"
        try:
            generation, _, reason = read_shared(lost_file(self.run_dir, self.index)).partition(" ")
        except FileNotFoundError:
            return None
        return reason if int(generation) == self.attempts else None

    def _restart(self, reason: str) -> bool:
        """Start another server, as often as `max_restarts` allows; whether one runs."""
        while self.attempts < self.max_restarts and not self.stop_event.is_set():
            logger.warning("%s; starting another, number %d of %d", reason, self.attempts + 1, self.max_restarts)
            self.attempts += 1
            try:
                self.process.stop(GRACE)
                self._running.close()
                self.start()
                return True
            except Exception as error:  # noqa: BLE001 - every failure is reported to the trainer, which waits for a server
                reason = str(error)
        if not self.stop_event.is_set():
            problem = f"{reason}; it was started again {self.attempts} times (engine.max_restarts={self.max_restarts})"
            logger.error("%s", problem)
            replace(self.endpoint, gone=problem).save(run_file(self.run_dir, self.index))
        return False


def reconnect(options: VllmOptions, job: EngineJob, stopping: Callable[[], bool], lost: Lost) -> list[Endpoint]:
    """The new endpoints of the lost servers, in order, within one deadline: other processes wait in a collective.

    Raises EngineGone at the deadline, if no server will come, or if the run is asked to stop.
    """
    look = _own_server if options.base_url is None else _server_at_url
    for index, (former, reason) in lost.items() if options.base_url is None else ():
        write_atomic(lost_file(job.run_dir, index), f"{former.generation} {reason}")
    ((key, seconds),) = options.waits.items()
    deadline, found = time.monotonic() + seconds, list[Endpoint]()
    for index, (former, reason) in lost.items():
        while isinstance(problem := look(options, job, index, former), str):
            if stopping():
                raise EngineGone(f"{reason}; the run was asked to stop, so it does not wait for another server")
            if time.monotonic() > deadline:
                raise EngineGone(f"{reason}; no server came in its place within {seconds} s ({key}){problem}")
            time.sleep(POLL)
        found.append(problem)
    return found


def _own_server(options: VllmOptions, job: EngineJob, index: int, former: Endpoint) -> Endpoint | str:
    """The server that `SupervisedServer` has started in place of `former`, at a new address; "" before."""
    try:
        endpoint = Endpoint.load(run_file(job.run_dir, index))
    except FileNotFoundError as error:
        raise EngineGone("the run is being ended, so no other vLLM server is started") from error
    if endpoint.gone:
        raise EngineGone(endpoint.gone)
    return endpoint if endpoint.generation > former.generation else ""


def _server_at_url(options: VllmOptions, job: EngineJob, index: int, former: Endpoint) -> Endpoint | str:
    """The server at `engine.base_url`, which may be back with another key and other weights, or why it is not."""
    try:
        return external_server(options, options.urls[index], job)
    except (ConfigError, EngineError) as error:
        return f": {error}"
