"""Collecting the next steps' rollouts while a step trains: `rollout.max_staleness`, `rollout.in_flight`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from grpocli.errors import GrpoError, RunError, ServiceGone
from grpocli.types import Status

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts
    from grpocli.distributed.world import World
    from grpocli.training.collector import Collector, RolloutBatch
    from grpocli.types import Group

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `close` waits for what is being collected."""

POLL_SECONDS = 0.2
"""How often one of several waiting processes hears of the others."""

GRACE_SECONDS = 2.0
"""How long a process waits for its own thread to fail as another's has: an engine's errors are most often shared."""


def version_of(group: Group) -> int:
    """The oldest weight version that sampled a token of it."""
    return min(rollout.completion.version for rollout in group.rollouts)


@dataclass(frozen=True, slots=True)
class MainThreadCall:
    """Work that only the main thread may do, with the weights as they are after whole steps."""

    work: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        try:
            self.result.set_result(self.work())
        except Exception as error:  # noqa: BLE001 - the thread raises it
            self.result.set_exception(error)


@dataclass(frozen=True, slots=True)
class PrefetchState:
    """What a resume goes on with. ready: collected for the next steps. draws, leftover: the collector's after those."""

    draws: int
    leftover: list[Group]
    ready: tuple[RolloutBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a process tells the others of its wait: what it has come to, and the error if there is one."""

    state: Literal["done", "failed", "call", "waiting"]
    said: str = ""
    gone: bool = False

    @classmethod
    def of(cls, error: BaseException) -> RankStatus:
        said = str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
        return cls("failed", said, isinstance(error, ServiceGone))


class Prefetcher:
    """Whole steps of rollouts, in order, collected by one thread at most `max_staleness` steps ahead of training.

    What step s asks for is sampled with the weights of step s or later, so at step s + max_staleness none of it is
    older than allowed. With max_staleness 0 there is no thread, and a step collects for itself.

    Several processes collect together, through a channel beside the main thread's collective calls. Which steps
    are collected before a sync is the main process's decision, or two processes might each wait for the other.
    """

    def __init__(
        self,
        collector: Collector,
        world: World,
        rollout: Rollouts,
        steps: int,
        done: int = 0,
        ready: Sequence[RolloutBatch] = (),
    ) -> None:
        """steps: of the whole run. done: steps trained. ready: what has been collected for the steps after those."""
        self.collector, self.world, self.steps = collector, world, steps
        self.max_staleness, self.in_flight = rollout.max_staleness, rollout.in_flight
        self._ready = deque(ready)
        self._wanted = self._started = self._collected = done + len(ready)  # numbers of steps
        self._changed = threading.Condition()
        self._last = self._end = math.inf  # the number of the last step that may begin before a sync; in this run
        self._drawn = collector.draws, collector.leftover
        self._closing = self._surfaced = False
        self._error: BaseException | None = None
        self._call: MainThreadCall | None = None
        self._channel = world.channel() if self.max_staleness else None
        self._thread: threading.Thread | None = None

    @property
    def progress(self) -> PrefetchState:
        """All that is ready, and how far prompts were drawn for that: what still runs is not in it."""
        with self._changed:
            draws, leftover = self._drawn if self.max_staleness else (self.collector.draws, self.collector.leftover)
            return PrefetchState(draws, leftover, tuple(self._ready))

    def collect(self, step: int) -> RolloutBatch:
        """The rollouts of step number `step`, those older than `max_staleness` left out.

        Ask for the steps after it too. Raises what the thread raised.
        """
        if not self.max_staleness:
            return self.collector.collect()
        self._start()
        with self._changed:
            self._wanted = max(self._wanted, min(step + self.max_staleness, self.steps))
            self._changed.notify_all()
        self._wait(lambda: bool(self._ready))
        with self._changed:
            collected = self._ready.popleft()
        return self._fresh(collected, step)

    @contextmanager
    def quiet(self, step: int) -> Iterator[None]:
        """A block before step number `step` in which nothing is collected, so that a completion has one version.

        What runs is waited for, and what the step needs. So with max_staleness 1 it is no matter of time which weights
        sample what. Steps after it that have not begun begin with the weights after the block. With in_flight nothing
        is waited for.
        """
        if not self._thread or self.in_flight:
            yield
            return
        try:
            with self._changed:
                self._last = step
            self._settle(step)
            yield
        finally:
            with self._changed:
                self._last = math.inf
                self._changed.notify_all()

    def drain(self, step: int) -> None:
        """Wait for what runs, and for step number `step` if it was asked for: what comes next in the run then does not
        depend on whether it goes on or is resumed.

        Raises what the thread raised, unless that was raised before: then what is ready is all there will be.
        """
        if self._thread and not self._surfaced:
            self._settle(step)

    def end(self, step: int) -> None:
        """Begin no step after number `step` any more: the run ends before it."""
        with self._changed:
            self._end = step

    def _settle(self, step: int) -> None:
        """Wait for all that has begun by now, and for step number `step` if it was asked for. Collective."""
        with self._changed:
            begun = max(self._started, min(step, self._wanted))
        begun = self.world.broadcast_object(begun)
        self._wait(lambda: self._collected >= begun)

    def in_main(self, work: Callable[[], T]) -> T:
        """Have the main thread do `work` when it next waits for rollouts, between two steps' updates.

        For the thread; the main one does it at once. Returns or raises what it did, RunError if the run ends before.
        """
        if threading.current_thread() is not self._thread:
            return work()
        call = MainThreadCall(work, Future())
        with self._changed:
            if self._closing:
                raise RunError("the run has ended")
            self._call = call
            self._changed.notify_all()
        done: T = call.result.result()  # always set: by the main thread, or by `close`
        return done

    def close(self, wait: bool = True) -> None:
        """End the thread. What does not end in time, or at once if not `wait`, is left to end with the process."""
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

    def _wait(self, done: Callable[[], bool]) -> None:
        """Until `done` in every process, in the main thread; does calls, raises the thread's error. Collective.

        The processes settle after each look what it has come to, so that all of them return, do an call or raise at
        the same point, however far their threads are. What is done counts more than an error after it. All that the
        threads do has deadlines of its own.
        """
        while True:
            statuses = self.world.gather_objects([self._look(done)])
            failed = [one for one in statuses if one.state == "failed"]
            if failed:
                raise self._failure(failed[0])
            if all(one.state == "done" for one in statuses):
                return
            if all(one.state == "call" for one in statuses):
                self._run_call()

    def _look(self, done: Callable[[], bool]) -> RankStatus:
        """This process's statuses when there are any; with several processes, also after a while."""
        with self._changed:
            self._changed.wait_for(
                lambda: done() or self._error or self._call, POLL_SECONDS if self.world.size > 1 else None
            )
            if done():
                return RankStatus("done")
            if self._error:
                return RankStatus.of(self._error)
            return RankStatus("call" if self._call else "waiting")

    def _run_call(self) -> None:
        """Raises what the call raised, once the thread has too: it has no other way to go on."""
        with self._changed:
            call, self._call = self._call, None
        assert call is not None
        call.run()
        if error := call.result.exception():
            raise self._failure(RankStatus.of(error))

    def _failure(self, told: RankStatus) -> BaseException:
        """The thread's own error if it is of the kind that the processes have settled on; the one told of if not."""
        with self._changed:
            self._changed.wait_for(lambda: self._error, GRACE_SECONDS)
            self._surfaced = True
            if self._error and isinstance(self._error, ServiceGone) == told.gone:
                return self._error
        return ServiceGone(told.said) if told.gone else RunError(told.said)

    def _fresh(self, collected: RolloutBatch, step: int) -> RolloutBatch:
        """Without groups that have become too old, and with what there is to tell about age."""
        groups: list[Group] = []
        stale: list[Group] = []
        for group in collected.groups:
            (groups if version_of(group) >= step - self.max_staleness else stale).append(group)
        ages = [step - rollout.completion.version for group in groups for rollout in group.rollouts]
        metrics = collected.metrics | {
            "sampling/kept": len(groups),
            "sampling/stale": len(stale),
            "staleness/mean": float(np.mean(ages)) if ages else 0.0,
            "staleness/max": max(ages, default=0),
        }
        rest = [*((Status.STALE, group) for group in stale), *collected.rest]
        return replace(collected, groups=groups, metrics=metrics, rest=rest)

    def _start(self) -> None:
        if not self._thread:
            # a daemon: where `close` gives up on it, the process must be able to end
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """The thread: one step after the other until `close`, or until one fails."""
        assert self._channel is not None
        try:
            with self._channel():
                while self._next():
                    collected = self._timed()
                    with self._changed:
                        self._ready.append(collected)
                        self._collected += 1
                        self._drawn = self.collector.draws, self.collector.leftover
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> bool:
        """Wait for a step to collect, and for the main process to begin it; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._collected < min(self._wanted, self._allowed))
            if self._collected >= self._wanted:
                return False
            begins = not self._closing  # if not, the other processes wait to hear it
            self._started += begins
        return self.world.broadcast_object(begins)

    @property
    def _allowed(self) -> float:
        """The last step that may begin; the other processes begin when the main one does."""
        return min(self._last, self._end) if self.world.is_main else math.inf

    def _timed(self) -> RolloutBatch:
        start = time.perf_counter()
        collected = self.collector.collect()
        seconds = time.perf_counter() - start - collected.metrics["time/reward"]
        return replace(collected, metrics=collected.metrics | {"time/generate": seconds})
