"""engine=vllm before any trainer process exists: start the run's own servers, or check the given ones."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import GrpoError
from grpocli.processes.guard import guarded
from grpocli.progress import unreported
from grpocli.rollout.vllm.endpoint import SHM, Endpoint, run_file
from grpocli.rollout.vllm.external_server import given_servers
from grpocli.rollout.vllm.nodes import servers_elsewhere
from grpocli.rollout.vllm.private_folder import private_folder, shared_memory_patterns
from grpocli.rollout.vllm.protocol import PROBE_ROOM
from grpocli.rollout.vllm.server import LOOPBACK, Spec, free_port, serving
from grpocli.rollout.vllm.supervisor import Watched
from grpocli.rollout.vllm.validate import check_room

if TYPE_CHECKING:
    from grpocli.processes.guard import Guarded
    from grpocli.rollout.engine import EngineJob
    from grpocli.rollout.vllm.config import VllmOptions

PORT_TRIES = 3
OUTLIVE = 15.0  # seconds after our death in which servers and trainer processes surely have ended too


@contextlib.contextmanager
def launch(options: VllmOptions, job: EngineJob) -> Iterator[None]:
    """Leave the servers' addresses and keys in the run folder for the trainer processes, until the block ends.

    Servers of the run's own that die meanwhile are started again.
    """
    if job.nodes:
        with servers_elsewhere(options, job):
            yield
        return
    told = run_file(job.run_dir).parent
    shutil.rmtree(told, ignore_errors=True)  # what a run that was killed left
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, told, ignore_errors=True)
        if options.base_url:
            for index, endpoint in enumerate(given_servers(options, job)):
                endpoint.save(run_file(job.run_dir, index))
        else:
            for one in stack.enter_context(started(options, job, threading.Event())):
                one.watch()
        yield


@contextlib.contextmanager
def started(
    options: VllmOptions, job: EngineJob, over: threading.Event, host: str = LOOPBACK, first: int = 0
) -> Iterator[list[Watched]]:
    """Servers of the run's own on this machine, with `job.gpus`, which answer; numbered from `first` on.

    All at once: n starts take little longer than one where there are cores for them. over: ends what they wait for.
    Raises ConfigError or EngineError where one cannot be started.
    """
    with contextlib.ExitStack() as stack:
        folder = job.sync_folder or str(stack.enter_context(_kept_folder()))
        watched = []
        for i, gpus in enumerate(gpu_slices(options, job.gpus)):
            starter = _Starter(options, job, folder, i, gpus, over, host)
            watched.append(Watched(first + i, job.run_dir, starter, over, options.max_restarts))
        stack.callback(_stop, watched, over)
        with ThreadPoolExecutor(len(watched)) as pool:
            try:
                for done in as_completed([pool.submit(one.start) for one in watched]):
                    done.result()
            except BaseException:
                over.set()  # else the pool would wait for the others
                raise
        yield watched


def _stop(watched: Sequence[Watched], over: threading.Event) -> None:
    over.set()
    with ThreadPoolExecutor(len(watched)) as pool:
        for stopped in [pool.submit(one.stop) for one in watched]:
            stopped.result()


@contextlib.contextmanager
def _kept_folder() -> Iterator[Path]:
    """A folder for weights that outlives any one server, and not us: where we cannot remove it, a guard does."""
    # it ignores TERM, so that its guard waits before it removes what the others may still be writing to
    command = ["sh", "-c", "trap '' TERM; exec sleep 2147483647"]
    with private_folder() as folder, contextlib.ExitStack() as stack:
        pieces = [f"{SHM}/{pattern}" for pattern in shared_memory_patterns(folder.path)]
        remove: list[Path | str] = [*pieces, folder.path]
        keeper = stack.enter_context(guarded(command, name="weights", remove=remove, hold=[folder.lock], grace=OUTLIVE))
        try:
            yield folder.path
        finally:
            keeper.stop(0)


class _Starter:
    """Makes server number `index` of this machine; what `Watched` calls."""

    def __init__(
        self,
        options: VllmOptions,
        job: EngineJob,
        folder: str,
        index: int,
        gpus: str | None,
        over: threading.Event,
        host: str,
    ) -> None:
        self.options, self.job, self.folder, self.index = options, job, folder, index
        self.gpus, self.over, self.host = gpus, over, host

    @contextlib.contextmanager
    def __call__(self, restarts: int) -> Iterator[tuple[Endpoint, Guarded]]:
        """A restart takes a new port, so that no request to the one before can reach a server with other weights.

        A free port may be taken by another process before the server listens: then try another.
        """
        fixed = self.options.port + self.index if self.options.port and not restarts else 0
        with contextlib.ExitStack() as stack:
            yield self._enter(stack, fixed, tries=1 if fixed else PORT_TRIES)

    def _enter(self, stack: contextlib.ExitStack, fixed: int, tries: int) -> tuple[Endpoint, Guarded]:
        spec = own_spec(self.options, self.job, fixed or free_port(), self.folder, self.gpus, self.host)
        where = "" if self.host == LOOPBACK else f"{self.host}_"
        log = self.job.run_dir.absolute() / "logs" / f"vllm_{where}{self.index}.log"
        try:
            progress = unreported if self.index else self.job.progress  # one of several is enough
            return stack.enter_context(serving(spec, self.options, log, self.over, progress=progress))
        except GrpoError as error:
            if tries == 1 or "Address already in use" not in str(error):
                raise
        return self._enter(stack, fixed, tries - 1)


def own_spec(
    options: VllmOptions, job: EngineJob, port: int, folder: str, gpus: str | None, host: str = LOOPBACK
) -> Spec:
    """A server of one run. Raises ConfigError if its context was chosen too small for the run."""
    check_room(options.max_model_len, job)
    room = options.max_model_len or max(job.max_tokens, PROBE_ROOM)
    return Spec.of(dataclasses.replace(job, sync_folder=folder), port, room, gpus=gpus, host=host)


def gpu_slices(options: VllmOptions, gpus: Sequence[str]) -> list[str | None]:
    """Of `gpus`, those of each replica, as CUDA_VISIBLE_DEVICES; None for each where there are none."""
    each = options.tensor_parallel * options.data_parallel
    if not gpus:
        return [None] * options.replicas
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(options.replicas)]
