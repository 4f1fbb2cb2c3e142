"""Rollouts as a stream: groups are sampled and scored while steps train (`rollout.max_staleness` above 0).

The main process asks all servers; `Schedule` says which groups start and which groups a step trains on.

    main thread                               a thread for each group
    -----------                               -----------------------
    batch(s): begin step s, start groups ---> sample one group
              wait, take the step's groups <- score all groups that have arrived, start others
    wait_until_idle: without in_flight, before a sync
    state: for a checkpoint

The condition `_changed` guards what they share. The other processes wait for the main process's broadcast.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from grpocli.errors import GrpoError, RewardError, RunError, ServiceGone
from grpocli.processes.threads import GRACE, run_in_thread
from grpocli.progress import Watch
from grpocli.rewards.scorer import ScoreStats
from grpocli.rollout.engine import Listener
from grpocli.rollout.sampling import derive_seed
from grpocli.training.collector import RolloutBatch
from grpocli.types import Completion, Episode, Group, Prompt, Request, Rollout

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts
    from grpocli.distributed.world import World
    from grpocli.training.collector import Collector

T = TypeVar("T")

logger = logging.getLogger(__name__)

STREAM_FILE = "stream.json"
POLL_SECONDS = 0.5
"""The longest time until the main process tells the others that it still waits, or that servers are lost."""
LOST = "lost"
"""The main process's word for: requests wait, and no server is left to answer them."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The rollouts of a checkpoint."""

    draws: int
    """Prompts drawn so far."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the ended groups depend on. A resume that changes it samples them again."""
    running: list[int] = field(default_factory=list)
    """The numbers of groups that are being sampled or scored; a resume asks for them again."""
    ended: list[Group] = field(default_factory=list)
    """Scored groups that no step has trained on, in the order in which they ended."""

    def save(self, folder: Path) -> None:
        """Write JSON. A prompt's text and columns are left out: its draw number, the uid, restores them."""
        if self.running or self.ended:
            ended = [
                (int(one.uid), one.prompt.token_ids, [(r.completion, r.text, r.rewards) for r in one.rollouts])
                for one in self.ended
            ]
            saved = {"settings": self.settings, "running": self.running, "ended": ended}
            (folder / STREAM_FILE).write_text(
                json.dumps(saved, default=lambda one: {f.name: getattr(one, f.name) for f in fields(one)})
            )

    @classmethod
    def load(cls, folder: Path, draws: int, settings: dict[str, Any], draw: Callable[[int], Prompt]) -> RolloutState:
        """The saved state, equal to the bit. draw: the prompt of a draw number.

        Groups whose settings or prompt have changed are sampled again, with a warning in the log. Raises ValueError
        for a broken file.
        """
        if not (folder / STREAM_FILE).is_file():
            return cls(draws, settings)
        saved = json.loads((folder / STREAM_FILE).read_text())
        same = saved["settings"] == json.loads(json.dumps(settings))
        running, ended = list(saved["running"]), list[Group]()
        for number, prompt_ids, rollouts in saved["ended"]:
            prompt = draw(number)
            if same and prompt.token_ids == prompt_ids:
                ended.append(Group(prompt, [_rollout(prompt, *one) for one in rollouts]))
            else:
                running.append(number)
        if unfit := len(saved["ended"]) - len(ended):
            logger.warning("%d groups do not fit the config, which has changed, and are sampled again", unfit)
        return cls(draws, settings, running, ended)


class RolloutStream:
    """Provides each step's rollouts.

    With max_staleness 0 there is no thread: each step collects its own rollouts. Every method but `close` is
    collective, and is called in the main thread.
    """

    def __init__(self, collector: Collector, world: World, rollout: Rollouts, done: int, saved: RolloutState) -> None:
        """done: steps trained so far. saved: the rollouts after them."""
        self.collector, self.world, self.schedule = collector, world, collector.schedule
        self.max_staleness, self.in_flight = rollout.max_staleness, rollout.in_flight
        self._changed = threading.Condition()
        self._failed = False
        """After an error: nothing waits for running groups."""
        self._before: tuple[int, RolloutState] | None = None
        """In rounds, the last step that began, and the state before it."""
        self._batch: tuple[int, RolloutBatch] | None = None
        """In a stream, the last batch with its step."""
        self._arrived: deque[tuple[Prompt, Sequence[Completion]]] = deque()
        """Groups to score."""
        self._error: BaseException | None = None
        """The first one of a thread."""
        self._closing = False
        self._settings = saved.settings
        self.schedule.step, self.schedule.draws, self.schedule.restarted = done, saved.draws, sorted(saved.running)
        self.schedule.running = {int(group.uid): done for group in saved.ended}
        collector.end(saved.ended, ScoreStats())
        started = len(saved.running) + len(saved.ended)
        self.schedule.ahead = max(1, min(self.max_staleness, started // self.schedule.prompts_per_step))

    # The main thread

    def batch(self, step: int, sync: Callable[[], None]) -> RolloutBatch:
        """The rollouts of a step. Raises the error of a thread.

        sync: brings lost servers back; collective.
        """
        if not self.max_staleness:
            self._before = step, self.state(step)
            return self.collector.collect(step)
        with self._changed:
            self.schedule.begin(step)
        batch = self._agree(lambda: self._take(step), sync)
        if not self.world.is_main:
            self._batch = step, batch
        assert self._batch
        return self._batch[1]

    def wait_until_idle(self, sync: Callable[[], None]) -> None:
        """Without `in_flight`, wait until no group runs; before a sync, and before a checkpoint. See `batch`.

        So no completion mixes weight versions, which version samples a group depends on no clock, and a run that is
        resumed from `state` continues exactly as this one.
        """
        if self._batch and not self.in_flight and not self._failed:
            self._agree(lambda: None if self.schedule.running else True, sync)

    def state(self, step: int) -> RolloutState:
        """The groups for `step` and later ones.

        If `step` has got its batch but was not trained, because of an error, its groups are among them.
        """
        if self._before and self._before[0] == step:
            return self._before[1]
        with self._changed:
            running = [*self.schedule.restarted, *self.schedule.running]
            ended = [*self.collector.ended.values()]
            if self._batch and self._batch[0] == step:
                batch = self._batch[1]
                ended = [*batch.groups, *(group for _, group in batch.untrained), *ended]
            return RolloutState(self.schedule.draws, self._settings, running, ended)

    def close(self, wait: bool = True) -> None:
        """Let no thread start or score a group any more. wait: give scoring GRACE seconds to end."""
        self._closing = True
        scoring = self.collector.sampler.scoring
        if wait and self.max_staleness and scoring.acquire(timeout=GRACE):
            scoring.release()

    def _agree(self, work: Callable[[], T | None], sync: Callable[[], None]) -> T:
        """What `work` returns in the main process once it is not None; until then, sync when servers are lost."""
        while True:
            found = self.world.broadcast_object(self._look(work) if self.world.is_main else None)
            self._failed = isinstance(found, RunError | str)  # if it is LOST, until the sync ends well
            if isinstance(found, RunError):
                raise self._error or found
            if isinstance(found, str):
                sync()
            elif found is not None:
                return found

    def _look(self, work: Callable[[], T | None]) -> T | RunError | str | None:
        """What `work` returns; else an error, which may be of a later step, or LOST; None after a while without any."""
        watch, size = self.collector.watch, self.schedule.prompts_per_step
        with self._changed:
            self._start()
            try:
                if (found := work()) is not None:
                    return found
            except GrpoError as error:
                self._error = self._error or error
            if self._error:
                return _for_others(self._error)
            if self.collector.sampler.engine.needs_sync:
                return LOST
            watch.progress(min(len(self.schedule.ready), size), size, "groups")
            self._changed.wait(POLL_SECONDS)
            return None

    def _take(self, step: int) -> RolloutBatch | None:
        """The step's batch, as the other processes get it; this one's is in `_batch`."""
        if (batch := self.collector.take()) is None:
            return None
        ready = [self.collector.ended[number] for number in self.schedule.ready]
        metrics = {"stream/ready": float(len(ready)), "stream/running": float(len(self.schedule.running))}
        if batch.groups:
            lengths = [fmean(one.completion.written for one in g.rollouts) for g in (*batch.groups, *ready)]
            metrics["stream/length_bias"] = fmean(lengths[: len(batch.groups)]) - fmean(lengths)
        self._batch = step, replace(batch, metrics=batch.metrics | metrics)
        self._start()
        return replace(self._batch[1], untrained=[])

    def _start(self) -> None:
        """Start the groups that the schedule wants. Needs `_changed`."""
        try:
            for number in [] if self._closing or self._error else self.schedule.start():
                run_in_thread(partial(self._sample, self.collector.draw(number)), "rollout")
        except GrpoError as error:  # of a broken row; it and those behind it stay in `running`
            self._error = self._error or error

    # The threads

    def _sample(self, prompt: Prompt) -> None:
        """Sample one group, and score all that have arrived in one call of each reward. An error ends the run.

        The group's episodes, if it has any, run in this thread.
        """
        collector, sampler = self.collector, self.collector.sampler
        seed = derive_seed(collector.seed, int(prompt.uid))
        request = Request(prompt.token_ids, collector.group_size, seed, prompt=prompt)
        listener = Listener(watch=Watch(cancelled=lambda: self._closing))
        try:
            (completions,) = sampler.episodes(here=True).generate([prompt], [request], collector.sampling, listener)
            self._arrived.append((prompt, completions))
            with sampler.scoring:  # meanwhile others arrive
                arrived = [self._arrived.popleft() for _ in range(0 if self._closing else len(self._arrived))]
                groups, stats = sampler.score(arrived, collector.sampling.max_tokens)
            with self._changed:
                collector.end(groups, stats)
                self._start()
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()


def _for_others(error: BaseException) -> RunError:
    """An error of the main process, as the others raise it."""
    message = str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
    kinds = (ServiceGone, RewardError)  # after which all processes save a checkpoint
    return next((kind for kind in kinds if isinstance(error, kind)), RunError)(message)


def _rollout(prompt: Prompt, done: dict[str, Any], text: str, rewards: dict[str, float]) -> Rollout:
    episode, spans = done.pop("episode"), done.pop("spans")
    spans = [(version, count) for version, count in spans] if spans else None
    return Rollout(
        prompt, Completion(**done, spans=spans, episode=Episode(**episode) if episode else None), text, rewards
    )
