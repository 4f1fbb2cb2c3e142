"""Rollouts as a stream: groups are sampled and scored while steps train (`rollout.max_staleness` above 0).

The main process asks all servers; `Schedule` says which groups start and which groups a step trains on.

    main thread                               a thread for each group
    -----------                               -----------------------
    batch(s): begin step s, start groups ---> sample one group
              wait, take the step's groups <- score all groups that have arrived, start others
    wait_until_idle: without in_flight, before a sync
    state: for a checkpoint

The condition `_changed` guards what they share. The other processes wait for the main process's broadcast. While it
waits, servers may be lost: then it broadcasts that all processes sync the engine, which brings them back.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpocli.errors import GrpoError, RewardError, RunError, ServiceGone
from grpocli.processes.threads import GRACE, run_in_thread
from grpocli.progress import Watch
from grpocli.rewards.scorer import RewardStats, ScoreStats
from grpocli.rollout.engine import Listener
from grpocli.rollout.sampling import derive_seed
from grpocli.training.collector import RolloutBatch, oldest_version
from grpocli.types import Completion, Episode, Group, Prompt, Request, Rollout

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts
    from grpocli.distributed.world import World
    from grpocli.training.collector import Collector

T = TypeVar("T")

logger = logging.getLogger(__name__)

STREAM_FILE = "stream.pt"
POLL_SECONDS = 0.5
"""The longest time until the main process tells the others that it still waits, or that servers are lost."""


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
    stats: ScoreStats = field(default_factory=ScoreStats)
    """Counts that no step has in its metrics."""

    def save(self, folder: Path) -> None:
        """Write plain values, which are read with `weights_only=True`.

        A prompt's text and columns are left out: its draw number, the uid, restores them.
        """
        if self.running or self.ended:
            counts = [(pair, asdict(one)) for pair, one in self.stats.rewards.items()]
            saved = {
                "settings": self.settings,
                "running": self.running,
                "ended": [_plain(group) for group in self.ended],
                "stats": (dict(self.stats.samples), self.stats.seconds, counts),
            }
            torch.save(saved, folder / STREAM_FILE)

    @classmethod
    def load(cls, folder: Path, draws: int, settings: dict[str, Any], draw: Callable[[int], Prompt]) -> RolloutState:
        """The saved state, equal to the bit. draw: the prompt of a draw number.

        If settings or prompts have changed, it asks again for all groups, with a warning in the log. Raises RunError
        for a broken file.
        """
        if not (folder / STREAM_FILE).is_file():
            return cls(draws, settings)
        try:
            saved = torch.load(folder / STREAM_FILE, weights_only=True)
        except (UnpicklingError, OSError) as error:
            raise RunError(f"{STREAM_FILE} is broken") from error
        numbers = [one["draw"] for one in saved["ended"]]
        prompts = [draw(number) for number in numbers]
        same = [prompt.token_ids == one["prompt_ids"] for prompt, one in zip(prompts, saved["ended"], strict=True)]
        if not (saved["settings"] == settings and all(same)):
            logger.warning("%d groups that do not fit the config, which has changed, are sampled again", len(numbers))
            return cls(draws, settings, [*saved["running"], *numbers])
        ended = [
            Group(prompt, [_rollout(prompt, *rollout) for rollout in one["rollouts"]])
            for prompt, one in zip(prompts, saved["ended"], strict=True)
        ]
        samples, seconds, counts = saved["stats"]
        stats = ScoreStats(Counter(samples), seconds, {pair: RewardStats(**one) for pair, one in counts})
        return cls(draws, settings, saved["running"], ended, stats)


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
        """Whether nothing waits for running groups any more, after an error."""
        self._before: tuple[int, RolloutState] | None = None
        """In rounds, the step that began last, with the state before it."""
        self._batch: tuple[int, RolloutBatch] | None = None
        """In a stream, the last batch with its step."""
        self._arrived: deque[tuple[Prompt, Sequence[Completion]]] = deque()
        """Groups to score."""
        self._lengths: list[int] = []
        """Tokens of the kept completions that have ended since the last batch."""
        self._error: BaseException | None = None
        """The first one of a thread."""
        self._closing = False
        self._settings, self.schedule.step = saved.settings, done
        collector.ended = {int(group.uid): group for group in saved.ended}
        kept = dict(zip(collector.ended, collector.kept(saved.ended), strict=True))
        ready = {number: oldest_version(group) for number, group in collector.ended.items() if kept[number]}
        self.schedule.restore(saved.running, ready, [number for number in kept if not kept[number]], saved.draws)
        collector.stats = saved.stats

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
        self._batch = step, batch
        return batch

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
            ended, stats = [*self.collector.ended.values()], self.collector.stats
            if self._batch and self._batch[0] == step:
                batch = self._batch[1]
                ended = [*batch.groups, *(group for _, group in batch.untrained), *ended]
                stats = batch.stats.add_round(stats)
            return RolloutState(self.schedule.draws, self._settings, running, ended, stats)

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
            self._failed = isinstance(found, RunError | _Lost)  # where servers are lost, until the sync ends well
            if isinstance(found, RunError):
                raise self._error or found
            if isinstance(found, _Lost):
                sync()
            elif found is not None:
                return found

    def _look(self, work: Callable[[], T | None]) -> T | RunError | _Lost | None:
        """What `work` returns, or an error, or that servers are lost; None after a while without any of them.

        What `work` returns comes first, because the error of a later step does not matter yet.
        """
        watch, size = self.collector.watch, self.schedule.prompts_per_step
        with self._changed:
            try:
                self._start()
                if (found := work()) is not None:
                    return found
            except GrpoError as error:
                self._error = self._error or error
            if self._error:
                return _for_others(self._error)
            if self.collector.sampler.engine.needs_sync:
                return _Lost()
            watch.progress(min(len(self.schedule.ready), size), size, "groups")
            self._changed.wait(POLL_SECONDS)
            return None

    def _take(self, step: int) -> RolloutBatch | None:
        batch = self.collector.take()
        if batch is None:
            return None
        ready, running = len(self.schedule.ready), len(self.schedule.running)
        self._start()
        metrics = {"stream/ready": float(ready), "stream/running": float(running)}
        if (trained := _lengths(batch.groups)) and self._lengths:
            metrics["stream/length_bias"] = statistics.fmean(trained) - statistics.fmean(self._lengths)
        self._lengths = []
        return replace(batch, metrics=batch.metrics | metrics)

    def _start(self) -> None:
        """Start the groups that the schedule wants. Needs `_changed`."""
        for number in [] if self._closing else self.schedule.start():
            run_in_thread(partial(self._sample, self.collector.draw(number)), "rollout")

    # The threads

    def _sample(self, prompt: Prompt) -> None:
        """Sample one group, and score all that have arrived in one call of each reward. An error ends the run.

        The group's episodes, if it has any, run in this thread.
        """
        collector, sampler = self.collector, self.collector.sampler
        request = Request(
            prompt.token_ids, collector.group_size, derive_seed(collector.seed, int(prompt.uid)), prompt=prompt
        )
        listener = Listener(watch=Watch(cancelled=lambda: self._closing))
        try:
            (completions,) = sampler.episodes_here.generate([prompt], [request], collector.sampling, listener)
            self._arrived.append((prompt, completions))
            with sampler.scoring:  # meanwhile others arrive
                arrived = [self._arrived.popleft() for _ in range(0 if self._closing else len(self._arrived))]
                groups, stats = sampler.score(arrived, collector.sampling.max_tokens)
            with self._changed:
                collector.end(groups, stats)
                kept = [group for group in groups if int(group.uid) in self.schedule.ready]
                self._lengths += _lengths(kept)
                self._start()
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Lost:
    """Requests wait, and no server is left to answer them."""


def _for_others(error: BaseException) -> RunError:
    """An error of the main process, as the others raise it."""
    message = str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
    kinds = (ServiceGone, RewardError)  # after which all processes save a checkpoint
    return next((kind for kind in kinds if isinstance(error, kind)), RunError)(message)


def _lengths(groups: Sequence[Group]) -> list[int]:
    return [rollout.completion.written for group in groups for rollout in group.rollouts]


# A saved state


def _plain(group: Group) -> dict[str, Any]:
    rollouts = [(asdict(one.completion), one.text, one.rewards) for one in group.rollouts]
    return {"draw": int(group.uid), "prompt_ids": group.prompt.token_ids, "rollouts": rollouts}


def _rollout(prompt: Prompt, done: dict[str, Any], text: str, rewards: dict[str, float]) -> Rollout:
    episode = done.pop("episode")
    return Rollout(prompt, Completion(**done, episode=Episode(**episode) if episode else None), text, rewards)
