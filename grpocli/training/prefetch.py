"""Collecting the rollouts of later steps while a step trains: `rollout.max_staleness`, `rollout.in_flight`.

Two threads share a `Prefetcher`. The main thread trains; the rollout thread samples and scores whole steps, in order:

    main thread                                   rollout thread
    -----------                                   --------------
    rollouts(s): request step s + max_staleness   wait until a requested step may begin
                 wait for a batch, take it        collect it, append it to `_ready`, and again
    collection_paused_before(s): let no step
                 after s begin, wait until the
                 thread is idle, send the weights after the block: go on with the new weights
    wait_until_idle(s), state: for a checkpoint
    while waiting: make the call, if there is one <- run_in_main_thread(work): wait for its result

The condition `_changed` guards what they share: the step numbers `_requested`, `_started` and `_collected`, the limits
`_pause_after` and `_stop_after`, the batches `_ready`, the rollout thread's `_call` and its `_error`.

With several processes each has both threads. The rollout threads make their collective calls in a separate channel.
The main process decides when a step begins, because two processes that decide for themselves could wait for each other.
Main threads wait in rounds: in each round every process reports a `RankStatus`, so that all of them return, make the
call or raise in the same round.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from grpocli.errors import GrpoError, RunError, ServiceGone
from grpocli.types import Status

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts
    from grpocli.distributed.world import World
    from grpocli.tasks.curriculum import TaskProblems
    from grpocli.training.collector import Collector, RolloutBatch
    from grpocli.types import Group

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for the rollout thread."""

POLL_SECONDS = 0.2
"""With several processes, the longest time between two rounds of `RankStatus`."""

GRACE_SECONDS = 2.0
"""Seconds that a process waits for its own thread's error when another process has failed: most errors are the
engine's.
"""


def version_of(group: Group) -> int:
    """The oldest weight version that sampled a token of the group."""
    return min(rollout.completion.version for rollout in group.rollouts)


def without_stale(batch: RolloutBatch, step: int, max_staleness: int) -> RolloutBatch:
    """The batch of a step without groups that are too old, with metrics of the ages."""
    groups: list[Group] = []
    stale: list[Group] = []
    for group in batch.groups:
        (groups if version_of(group) >= step - max_staleness else stale).append(group)
    ages = [step - rollout.completion.version for group in groups for rollout in group.rollouts]
    metrics = batch.metrics | {
        "sampling/kept": len(groups),
        "sampling/stale": len(stale),
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": max(ages, default=0),
    }
    untrained = [*((Status.STALE, group) for group in stale), *batch.untrained]
    return replace(batch, groups=groups, metrics=metrics, untrained=untrained)


@dataclass(frozen=True, slots=True)
class MainThreadCall:
    """Work that must run in the main thread, between two steps' updates."""

    work: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        try:
            self.result.set_result(self.work())
        except Exception as error:  # noqa: BLE001 - the rollout thread raises it
            self.result.set_exception(error)


@dataclass(frozen=True, slots=True)
class PrefetchState:
    """The saved state of a prefetcher.

    ready: batches of the next steps. draws, leftover, problems: the collector's state after them.
    """

    draws: int
    leftover: list[Group]
    problems: Mapping[str, TaskProblems] = field(default_factory=dict)
    ready: tuple[RolloutBatch, ...] = ()


def _state(collector: Collector) -> PrefetchState:
    return PrefetchState(collector.draws, collector.leftover, collector.curriculum.state())


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status that a waiting process sends to the others. error_gone: whether the error is a ServiceGone."""

    state: Literal["done", "failed", "call", "waiting"]
    error: str = ""
    error_gone: bool = False

    @classmethod
    def failed(cls, error: BaseException) -> RankStatus:
        message = str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
        return cls("failed", message, isinstance(error, ServiceGone))


class Prefetcher:
    """Provides each step's rollouts, collected by a thread up to `max_staleness` steps before they are trained on.

    Rollouts that step s requests are sampled with weight version s or later, so none is older than `max_staleness`
    versions when step s + max_staleness trains on it. With max_staleness 0 there is no thread: each step collects its
    own rollouts.
    """

    def __init__(
        self,
        collector: Collector,
        world: World,
        rollout: Rollouts,
        steps: int,
        done: int = 0,
        ready: Sequence[RolloutBatch] = (),
        returnable: bool = False,
    ) -> None:
        """steps: of the whole run. done: steps trained so far. ready: batches of a checkpoint, for the next steps.

        returnable: whether `give_back` may be called.
        """
        self.returnable = returnable
        self.collector, self.world, self.steps = collector, world, steps
        self.max_staleness, self.in_flight = rollout.max_staleness, rollout.in_flight
        self._changed = threading.Condition()
        self._ready = deque(ready)
        self._requested = self._started = self._collected = done + len(ready)
        self._pause_after = self._stop_after = math.inf
        collector.collected = self._collected
        self._collector_state = _state(collector) if self.max_staleness else None
        self._taken: RolloutBatch | PrefetchState | None = None
        self._call: MainThreadCall | None = None
        self._error: BaseException | None = None
        self._error_raised = self._closing = False
        self._channel = world.channel() if self.max_staleness else None
        self._thread: threading.Thread | None = None

    # The main thread. Every method but `close` is collective.

    @property
    def state(self) -> PrefetchState:
        """The batches that are ready, and the collector's state after them. A step being collected is not included."""
        with self._changed:
            return replace(self._collector_state or _state(self.collector), ready=tuple(self._ready))

    def rollouts(self, step: int) -> RolloutBatch:
        """The rollouts of a step, without groups older than `max_staleness`; requests the steps after it too.

        Raises the error of the rollout thread.
        """
        if not self.max_staleness:
            self._taken = _state(self.collector) if self.returnable else None
            return self.collector.collect()
        self._start_thread()
        with self._changed:
            self._requested = max(self._requested, min(step + self.max_staleness, self.steps))
            self._changed.notify_all()
        self._wait(lambda: bool(self._ready))
        with self._changed:
            batch = self._ready.popleft()
            self._taken = batch
        return without_stale(batch, step, self.max_staleness)

    def give_back(self) -> None:
        """Undo the last call of `rollouts` in `state`, because its step was not trained and the run ends."""
        with self._changed:
            if isinstance(self._taken, PrefetchState):
                self._collector_state = self._taken
            elif self._taken:
                self._ready.appendleft(self._taken)

    @contextmanager
    def collection_paused_before(self, step: int) -> Iterator[None]:
        """A block during which nothing is collected; it precedes `step`. So no completion mixes weight versions.

        It begins when the running steps and the given step, if requested, are collected: with max_staleness 1 this
        makes weight versions deterministic. Later steps begin after the block. With `in_flight` it does nothing.
        """
        if not self._thread or self.in_flight:
            yield
            return
        try:
            with self._changed:
                self._pause_after = step
            self._wait_collected(step)
            yield
        finally:
            with self._changed:
                self._pause_after = math.inf
                self._changed.notify_all()

    def wait_until_idle(self, step: int) -> None:
        """Wait until the running steps and the given step, if requested, are collected.

        A run that is resumed from `state` then continues exactly as this one. Raises the error of the rollout thread,
        unless it was raised before; in that case nothing more will be collected.
        """
        if self._thread and not self._error_raised:
            self._wait_collected(step)

    def stop_after(self, step: int) -> None:
        """Let no step after this one begin: the run ends."""
        with self._changed:
            self._stop_after = step

    def close(self, wait: bool = True) -> None:
        """End the thread. wait: give it CLOSE_SECONDS; a thread that still runs ends with the process."""
        with self._changed:
            self._closing = True
            if self._call:
                self._call.result.set_exception(RunError("the run has ended"))
                self._call = None
            self._changed.notify_all()
        if self._thread and wait:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("rollouts were still being collected %g s after the end of the run", CLOSE_SECONDS)

    def _start_thread(self) -> None:
        if not self._thread:
            # a daemon: the process must be able to exit when `close` gives up
            self._thread = threading.Thread(target=self._collect_steps, name="rollouts", daemon=True)
            self._thread.start()

    def _wait_collected(self, step: int) -> None:
        with self._changed:
            last = max(self._started, min(step, self._requested))
        last = self.world.broadcast_object(last)
        self._wait(lambda: self._collected >= last)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` in every process; meanwhile make the thread's calls and raise its error.

        There is no timeout here: everything that a rollout thread does has its own.
        """
        while True:
            statuses = self.world.gather_objects([self._status(done)])
            failed = [one for one in statuses if one.state == "failed"]
            if failed:
                raise self._agreed_error(failed[0])
            if all(one.state == "done" for one in statuses):
                return
            if all(one.state == "call" for one in statuses):
                self._run_call()

    def _status(self, done: Callable[[], bool]) -> RankStatus:
        """Wait for a status other than "waiting"; with several processes, at most POLL_SECONDS.

        "done" comes before "failed": an error of a later step does not matter yet.
        """
        with self._changed:
            timeout = POLL_SECONDS if self.world.size > 1 else None
            self._changed.wait_for(lambda: done() or self._error or self._call, timeout)
            if done():
                return RankStatus("done")
            if self._error:
                return RankStatus.failed(self._error)
            return RankStatus("call" if self._call else "waiting")

    def _run_call(self) -> None:
        """Make the thread's call. If it raises, the thread raises the same error and ends; then raise it here."""
        with self._changed:
            call, self._call = self._call, None
        assert call is not None
        call.run()
        if error := call.result.exception():
            raise self._agreed_error(RankStatus.failed(error))

    def _agreed_error(self, status: RankStatus) -> BaseException:
        """This process's own error if it is of the reported kind, else the reported one, so that all stop alike."""
        with self._changed:
            self._changed.wait_for(lambda: self._error, GRACE_SECONDS)
            self._error_raised = True
            if self._error and isinstance(self._error, ServiceGone) == status.error_gone:
                return self._error
        return ServiceGone(status.error) if status.error_gone else RunError(status.error)

    # The rollout thread

    def run_in_main_thread(self, work: Callable[[], T]) -> T:
        """Have the main thread run `work` when it next waits for rollouts, never in the middle of an update.

        The main thread itself runs it at once. Raises what `work` raises, and RunError if the run ends first.
        """
        if threading.current_thread() is not self._thread:
            return work()
        call = MainThreadCall(work, Future())
        with self._changed:
            if self._closing:
                raise RunError("the run has ended")
            self._call = call
            self._changed.notify_all()
        result: T = call.result.result()  # the main thread always sets it, in `_run_call` or in `close`
        return result

    def _collect_steps(self) -> None:
        assert self._channel is not None
        try:
            with self._channel():
                while self._next_step():
                    batch, state = self._collect(), _state(self.collector)
                    with self._changed:
                        self._ready.append(batch)
                        self._collected += 1
                        self._collector_state = state
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_step(self) -> bool:
        """Wait until a step may begin. False when `close` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._collected < min(self._requested, self._limit))
            if self._collected >= self._requested:
                return False
            begins = not self._closing
            self._started += begins
        return self.world.broadcast_object(begins)  # also when closing: the other processes wait for the answer

    @property
    def _limit(self) -> float:
        """The last step that may begin now. Infinite in other processes, which follow the main one's broadcast."""
        return min(self._pause_after, self._stop_after) if self.world.is_main else math.inf

    def _collect(self) -> RolloutBatch:
        start = time.perf_counter()
        batch = self.collector.collect()
        seconds = time.perf_counter() - start - batch.metrics["time/reward"]
        return replace(batch, metrics=batch.metrics | {"time/generate": seconds})
