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

The condition `_changed` guards what they share.

With several processes each has both threads. The rollout threads make their collective calls in a separate channel.
The main process decides when a step begins, because two processes that decide for themselves could wait for each other.
Main threads wait in rounds: in each round every process reports whether it is done, has a call, waits or has failed, so
that all of them return, make the call or raise in the same round.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from grpocli.errors import GrpoError, RunError, ServiceGone
from grpocli.processes.threads import GRACE, fulfil, run_in_thread
from grpocli.training.collector import RolloutBatch
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Status

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts
    from grpocli.distributed.world import World
    from grpocli.training.collector import Collector

T = TypeVar("T")

logger = logging.getLogger(__name__)

LEFTOVER_FILE, PREFETCHED_FILE = "carried.pt", "ahead.pt"

Draw: TypeAlias = Callable[[int], Prompt]
"""The prompt of a draw, by its number."""

POLL_SECONDS = 0.2
"""With several processes, the longest time between two rounds."""


def without_stale(batch: RolloutBatch, step: int, max_staleness: int) -> RolloutBatch:
    """The batch of a step without groups that have a token of a too old version, with metrics of the ages."""
    groups: list[Group] = []
    stale: list[tuple[Status, Group]] = []
    for group in batch.groups:
        if min(rollout.completion.version for rollout in group.rollouts) < step - max_staleness:
            stale.append((Status.STALE, group))
        else:
            groups.append(group)
    ages = [step - rollout.completion.version for group in groups for rollout in group.rollouts]
    metrics = {
        "sampling/kept": len(groups),
        "sampling/stale": len(stale),
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": max(ages, default=0),
    }
    return replace(batch, groups=groups, metrics=batch.metrics | metrics, untrained=[*stale, *batch.untrained])


@dataclass(frozen=True, slots=True)
class PrefetchState:
    """The saved state of a prefetcher."""

    draws: int
    """Prompts drawn for the batches."""
    leftover: list[Group]
    """The collector's, after the batches."""
    ready: tuple[RolloutBatch, ...] = ()
    """Batches of the next steps."""

    @classmethod
    def of(cls, collector: Collector) -> PrefetchState:
        return cls(collector.draws, collector.leftover)

    def save(self, folder: Path) -> None:
        """Write tensors and plain values, which are read with `weights_only=True`.

        A prompt's text and columns are left out: its draw number, the uid, restores them.
        """
        if self.leftover:
            torch.save([_group(group) for group in self.leftover], folder / LEFTOVER_FILE)
        batches = [
            {
                "groups": [_group(group) for group in batch.groups],
                "metrics": batch.metrics,
                "rest": [(str(status), _group(group)) for status, group in batch.untrained],
                "carried": sorted(batch.leftover_uids),
            }
            for batch in self.ready
        ]
        if batches:
            torch.save(batches, folder / PREFETCHED_FILE)


def _portable(error: BaseException) -> RunError:
    """An error as the other processes raise it."""
    message = str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
    return ServiceGone(message) if isinstance(error, ServiceGone) else RunError(message)


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
    ) -> None:
        """steps: of the whole run. done: steps trained so far. ready: batches of a checkpoint, for the next steps."""
        self.collector, self.world, self.steps = collector, world, steps
        self.max_staleness, self.in_flight = rollout.max_staleness, rollout.in_flight
        self._changed = threading.Condition()
        self._ready = deque(ready)
        self._requested = self._started = self._collected = done + len(ready)
        """The last step that was requested, that began, and that is collected."""
        self._pause_after = self._stop_after = math.inf
        """No later step begins."""
        self._state = PrefetchState.of(collector) if self.max_staleness else None
        """The collector's state after the last batch of `_ready`."""
        self._taken: tuple[int, RolloutBatch | PrefetchState] | None = None
        """The step that `rollouts` last served, with its batch or, without a thread, the state before it."""
        self._call: tuple[Callable[[], Any], Future[Any]] | None = None
        """Work that the rollout thread wants done in the main thread, between two steps' updates."""
        self._channel = world.channel() if self.max_staleness else None
        self._thread: Future[None] | None = None
        self._ident: int | None = None
        self._error_raised = self._closing = False

    # The main thread. Every method but `close` is collective.

    def state(self, step: int) -> PrefetchState:
        """The batches for `step` and later ones, and the collector's state after them; no step that is being collected.

        If `step` has got its rollouts but was not trained, because of an error, they are among them.
        """
        with self._changed:
            state, ready = self._state or PrefetchState.of(self.collector), tuple(self._ready)
            if self._taken and self._taken[0] == step:
                if isinstance(taken := self._taken[1], PrefetchState):
                    return taken
                ready = (taken, *ready)
            return replace(state, ready=ready)

    def rollouts(self, step: int) -> RolloutBatch:
        """The rollouts of a step, without groups older than `max_staleness`; requests the steps after it too.

        Raises the error of the rollout thread.
        """
        if not self.max_staleness:
            self._taken = step, PrefetchState.of(self.collector)
            return self.collector.collect()
        if not self._thread:
            self._thread = run_in_thread(self._collect_steps, "rollouts")
            self._thread.add_done_callback(lambda _: self._notify())
        with self._changed:
            self._requested = max(self._requested, min(step + self.max_staleness, self.steps))
        self._notify()
        self._wait(lambda: bool(self._ready))
        with self._changed:
            batch = self._ready.popleft()
            self._taken = step, batch
        return without_stale(batch, step, self.max_staleness)

    @contextmanager
    def collection_paused_before(self, step: int) -> Iterator[None]:
        """A block during which nothing is collected; it precedes `step`. So no completion mixes weight versions.

        It begins when the running steps and the given step, if requested, are collected: with max_staleness 1 this
        makes weight versions deterministic. Later steps begin after the block. With `in_flight` it does nothing.
        """
        if not self._thread or self.in_flight:
            yield
            return
        self._pause_after = step
        try:
            self._wait_collected(step)
            yield
        finally:
            self._pause_after = math.inf
            self._notify()

    def wait_until_idle(self, step: int) -> None:
        """Wait until the running steps and the given step, if requested, are collected.

        A run that is resumed from `state` then continues exactly as this one. Raises the error of the rollout thread,
        unless it was raised before; in that case nothing more will be collected.
        """
        if self._thread and not self._error_raised:
            self._wait_collected(step)

    def stop_after(self, step: int) -> None:
        """Let no step after this one begin: the run ends."""
        self._stop_after = step

    def close(self, wait_for_thread: bool = True) -> None:
        """End the thread. wait_for_thread: give it GRACE seconds; a thread that still runs ends with the process."""
        with self._changed:
            self._closing = True
            if self._call:
                self._call[1].set_exception(RunError("the run has ended"))
                self._call = None
        self._notify()
        if self._thread and wait_for_thread and wait([self._thread], GRACE).not_done:
            logger.warning("rollouts were still being collected %g s after the end of the run", GRACE)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def _error(self) -> BaseException | None:
        """The error that ended the thread."""
        return self._thread.exception() if self._thread and self._thread.done() else None

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
            if failed := [one for one in statuses if isinstance(one, RunError)]:
                raise self._agreed_error(failed[0])
            if all(one == "done" for one in statuses):
                return
            if all(one == "call" for one in statuses):
                self._run_call()

    def _status(self, done: Callable[[], bool]) -> str | RunError:
        """Wait for a status other than "waiting"; with several processes, at most POLL_SECONDS.

        "done" comes before an error: that of a later step does not matter yet.
        """
        with self._changed:
            timeout = POLL_SECONDS if self.world.size > 1 else None
            self._changed.wait_for(lambda: done() or self._error or self._call, timeout)
            if done():
                return "done"
            if self._error:
                return _portable(self._error)
            return "call" if self._call else "waiting"

    def _run_call(self) -> None:
        """Make the thread's call. If it raises, the thread raises the same error and ends; then raise it here."""
        with self._changed:
            call, self._call = self._call, None
        assert call is not None
        work, result = call
        fulfil(result, work)
        if error := result.exception():
            assert self._thread
            wait([self._thread], GRACE)
            raise self._agreed_error(_portable(error))

    def _agreed_error(self, reported: RunError) -> BaseException:
        """This process's own error if it is of the reported kind, else the reported one, so that all stop alike."""
        self._error_raised = True
        own = self._error
        same_kind = isinstance(own, ServiceGone) == isinstance(reported, ServiceGone)
        return own if own and same_kind else reported

    # The rollout thread

    def run_in_main_thread(self, work: Callable[[], T]) -> T:
        """Have the main thread run `work` when it next waits for rollouts, never in the middle of an update.

        The main thread itself runs it at once. Raises what `work` raises, and RunError if the run ends first.
        """
        if threading.get_ident() != self._ident:
            return work()
        result: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise RunError("the run has ended")
            self._call = work, result
        self._notify()
        return result.result()  # the main thread always sets it, in `_run_call` or in `close`

    def _collect_steps(self) -> None:
        assert self._channel is not None
        self._ident = threading.get_ident()
        with self._channel():
            while self._next_step():
                batch, state = self._collect(), PrefetchState.of(self.collector)
                with self._changed:
                    self._ready.append(batch)
                    self._collected += 1
                    self._state = state
                self._notify()

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


# A saved state


def load_leftover(folder: Path, draw: Draw, group_size: int, rewards: Iterable[str], max_groups: int) -> list[Group]:
    """The leftover groups of a saved state, equal to the bit; at most `max_groups`, all of which the next step uses.

    Groups that do not fit a config changed by a resume (seed, task, group size, rewards) are left out, with a warning
    in the log.
    """
    if not (folder / LEFTOVER_FILE).is_file():
        return []
    saved = torch.load(folder / LEFTOVER_FILE, weights_only=True)
    found = [_restore(group, draw, group_size, set(rewards)) for group in saved]
    groups = [group for group in found if group][:max_groups]
    if len(groups) < len(saved):
        logger.warning("%d of %d leftover groups do not fit the changed config", len(saved) - len(groups), len(saved))
    return groups


def load_prefetched(
    folder: Path, draw: Draw, group_size: int, rewards: Iterable[str], wanted: bool, is_main: bool
) -> list[RolloutBatch]:
    """The batches of a saved state, equal to the bit.

    Empty, with a warning in the log, if they do not fit a config changed by a resume (see `load_leftover`), or if the
    run no longer prefetches (not `wanted`). Untrained groups are left out if they do not fit: only the main process has
    them, and all processes must decide alike.
    """
    if not (folder / PREFETCHED_FILE).is_file():
        return []

    def restored(group: dict[str, Any]) -> Group | None:
        return _restore(group, draw, group_size, set(rewards))

    saved, batches = torch.load(folder / PREFETCHED_FILE, weights_only=True), []
    for one in saved:
        groups = [group for saved_group in one["groups"] if (group := restored(saved_group))]
        rest = one["rest"] if is_main else []
        untrained = [(Status(status), group) for status, saved_group in rest if (group := restored(saved_group))]
        if wanted and len(groups) == len(one["groups"]):
            batches.append(RolloutBatch(groups, one["metrics"], {}, untrained, frozenset(one["carried"])))
    if len(batches) == len(saved):
        return batches
    logger.warning("the rollouts of %d steps collected ahead do not fit the changed config", len(saved))
    return []


def _restore(saved: dict[str, Any], draw: Draw, size: int, names: set[str]) -> Group | None:
    prompt = draw(int(saved["draw"]))
    rollouts = [_rollout(prompt, r) for r in saved["rollouts"]]
    same_prompt = prompt.token_ids == saved["prompt_ids"].tolist()
    fits = same_prompt and len(rollouts) == size and all(set(r.rewards) == names for r in rollouts)
    return Group(prompt, rollouts) if fits else None


def _group(group: Group) -> dict[str, Any]:
    rollouts = [asdict(r.completion) | {"text": r.text, "rewards": r.rewards} for r in group.rollouts]
    for rollout in rollouts:
        rollout["token_ids"] = torch.tensor(rollout["token_ids"], dtype=torch.int32)
        rollout["logprobs"] = torch.tensor(rollout["logprobs"], dtype=torch.float64)
    return {
        "draw": int(group.uid),
        "prompt_ids": torch.tensor(group.prompt.token_ids, dtype=torch.int32),
        "rollouts": rollouts,
    }


def _rollout(prompt: Prompt, saved: dict[str, Any]) -> Rollout:
    ids, logp = saved.pop("token_ids"), saved.pop("logprobs")
    text, rewards, episode = saved.pop("text"), saved.pop("rewards"), saved.pop("episode")
    done = Completion(ids.tolist(), logp.tolist(), **saved, episode=Episode(**episode) if episode else None)
    return Rollout(prompt, done, text, rewards)
