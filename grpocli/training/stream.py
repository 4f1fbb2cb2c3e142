"""Rollouts as a stream: groups are sampled and scored while steps train (`rollout.max_staleness` above 0).

The main process asks all servers; `Schedule` says which groups start and which groups a step trains on.

    main thread                               a thread for each group   thread "scores"
    -----------                               -----------------------   ---------------
    batch(s): begin step s, start groups ---> sample one group each --> score the groups that have arrived,
              wait, take the step's groups <--------------------------- end them, start others
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
from concurrent.futures import Future, wait
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from grpocli.errors import GrpoError, RewardError, RunError, ServiceGone
from grpocli.processes.threads import GRACE, run_in_thread
from grpocli.progress import Watch
from grpocli.rewards.scorer import RewardStats, ScoreStats
from grpocli.rollout.engine import Listener
from grpocli.rollout.sampling import derive_seed
from grpocli.training.collector import RolloutBatch, SampledGroups
from grpocli.types import Completion, Episode, Group, Prompt, Request, Rollout, Sampling, Status

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts
    from grpocli.distributed.world import World
    from grpocli.training.collector import Collector

T = TypeVar("T")

logger = logging.getLogger(__name__)

STREAM_FILE = "stream.pt"
POLL_SECONDS = 0.5
"""The longest time until the main process tells the others that it still waits, or that servers are lost."""

Draw: TypeAlias = Callable[[int], Prompt]
"""The prompt of a draw, by its number."""


def staleness(groups: Sequence[Group], step: int, most: int) -> dict[str, float]:
    """The ages in weight versions of the tokens that a step trains on, and the share of each age up to `most`."""
    tokens = Counter(dict.fromkeys(range(most + 1), 0))
    for done in (rollout.completion for group in groups for rollout in group.rollouts):
        for version, count in done.spans or [(done.version, len(done.token_ids))]:
            tokens[step - version] += count
    mean = sum(age * count for age, count in tokens.items()) / max(1, tokens.total())
    shares = {f"staleness/{age}": count / max(1, tokens.total()) for age, count in sorted(tokens.items())}
    return {"staleness/mean": mean, "staleness/max": float(max(+tokens, default=0)), **shares}


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A scored group that no step has trained on."""

    group: Group
    stats: ScoreStats
    """Of its samples."""
    kept: bool
    """By the algorithm."""

    @property
    def number(self) -> int:
        return int(self.group.uid)

    @property
    def version(self) -> int:
        """The weight version of its oldest token."""
        return min(rollout.completion.version for rollout in self.group.rollouts)


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The rollouts of a checkpoint."""

    draws: int
    """Prompts drawn so far."""
    running: list[int] = field(default_factory=list)
    """The numbers of groups that are being sampled or scored; a resume asks for them again."""
    ended: list[EndedGroup] = field(default_factory=list)
    """In the order in which they ended."""
    sampling: Sampling | None = None
    """With which the ended groups were sampled."""

    def save(self, folder: Path) -> None:
        """Write tensors and plain values, which are read with `weights_only=True`.

        A prompt's text and columns are left out: its draw number, the uid, restores them.
        """
        if self.running or self.ended:
            ended = [(_plain(one.group), _plain_stats(one.stats), one.kept) for one in self.ended]
            sampling = asdict(self.sampling) if self.sampling else None
            torch.save({"sampling": sampling, "running": self.running, "ended": ended}, folder / STREAM_FILE)

    @classmethod
    def load(
        cls, folder: Path, draws: int, draw: Draw, group_size: int, rewards: Sequence[str], sampling: Sampling
    ) -> RolloutState:
        """The saved state, equal to the bit.

        Groups that do not fit a config changed by a resume (seed, task, group size, rewards, sampling) are sampled
        again, with a warning in the log. Raises RunError for a broken file.
        """
        if not (folder / STREAM_FILE).is_file():
            return cls(draws, sampling=sampling)
        try:
            saved = torch.load(folder / STREAM_FILE, weights_only=True)
        except (UnpicklingError, OSError) as error:
            raise RunError(f"{STREAM_FILE} is broken") from error
        running, ended = saved["running"], list[EndedGroup]()
        same = saved["sampling"] == asdict(sampling)
        for one, stats, kept in saved["ended"]:
            if same and (group := _restored(one, draw, group_size, set(rewards))):
                ended.append(EndedGroup(group, _restored_stats(stats), kept))
            else:
                running.append(one["draw"])
        _warn_unfit(len(saved["ended"]) - len(ended), "do not fit the config, which has changed,")
        return cls(draws, running, ended, sampling)


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
        self._begun = False
        """Whether a step has wanted a batch."""
        self._failed = False
        """Whether an error was raised: then nothing waits for running groups."""
        self._taken: tuple[int, list[EndedGroup] | RolloutState] | None = None
        """The step that `batch` last served, with its groups or, in rounds, the state before it."""
        self._prompts: dict[int, Prompt] = {}
        """Of running groups."""
        self._arrived: deque[tuple[int, Sequence[Completion]]] = deque()
        """Groups to score."""
        self._ended: dict[int, EndedGroup] = {}
        self._lengths: list[int] = []
        """Tokens of the kept completions that have ended since the last batch."""
        self._untrained: list[tuple[Status, Group]] = []
        """Of the last batch."""
        self._scoring: Future[None] | None = None
        self._error: BaseException | None = None
        """The first one of a thread."""
        self._closing = False
        self.schedule.step = done
        ready = {one.number: one.version for one in saved.ended if one.kept}
        rejected = [one.number for one in saved.ended if not one.kept and self.max_staleness]
        if not self.schedule.restore(saved.running, ready, rejected, saved.draws):
            _warn_unfit(len(ready), "are older than rollout.max_staleness allows")
        self._ended = {one.number: one for one in saved.ended if one.number in {*self.schedule.ready, *rejected}}
        if not self.max_staleness:
            collector.leftover = [one.group for one in self._ended.values()]

    # The main thread

    def batch(self, step: int, sync: Callable[[], None]) -> RolloutBatch:
        """The rollouts of a step. Raises the error of a thread.

        sync: brings lost servers back; collective.
        """
        if not self.max_staleness:
            self._taken = step, self._carried
            return self.collector.collect(step)
        self._begun = True
        if self.world.is_main:
            self._scoring = self._scoring or run_in_thread(partial(self._guard, self._score), "scores")
            with self._changed:
                self.schedule.begin(step)
        batch = self._agree(lambda: self._take(step), sync)
        return replace(batch, untrained=self._untrained)

    def wait_until_idle(self, sync: Callable[[], None]) -> None:
        """Without `in_flight`, wait until no group runs; before a sync, and before a checkpoint. See `batch`.

        So no completion mixes weight versions, which version samples a group depends on no clock, and a run that is
        resumed from `state` continues exactly as this one.
        """
        if self._begun and not self.in_flight and not self._failed:
            self._agree(lambda: None if self.schedule.running else True, sync)

    def stop_after(self, step: int) -> None:
        """Let no group start for a later step: the run ends."""
        with self._changed:
            self.schedule.steps = step

    def state(self, step: int) -> RolloutState:
        """The groups for `step` and later ones.

        If `step` has got its batch but was not trained, because of an error, its groups are among them.
        """
        taken = self._taken[1] if self._taken and self._taken[0] == step else []
        if isinstance(taken, RolloutState):
            return taken
        if not self.max_staleness:
            return self._carried
        with self._changed:
            running = [*self.schedule.restarted, *self.schedule.running]
            ended = [*taken, *self._ended.values()]
            return RolloutState(self.schedule.draws, running, ended, self.collector.sampling)

    @property
    def _carried(self) -> RolloutState:
        """The state between two steps that sample in rounds: draws, and surplus groups for the next step."""
        carried = [EndedGroup(group, ScoreStats(), kept=True) for group in self.collector.leftover]
        return RolloutState(self.schedule.draws, list(self.schedule.restarted), carried, self.collector.sampling)

    def close(self, wait_for_threads: bool = True) -> None:
        """End the threads. wait_for_threads: give them GRACE seconds; one that still runs ends with the process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._scoring and wait_for_threads and wait([self._scoring], GRACE).not_done:
            logger.warning("rollouts were still being scored %g s after the end of the run", GRACE)

    def _agree(self, work: Callable[[], T | None], sync: Callable[[], None]) -> T:
        """What `work` returns in the main process once it is not None; until then, sync when servers are lost."""
        while True:
            found = self.world.broadcast_object(self._look(work) if self.world.is_main else None)
            if isinstance(found, RunError):
                self._failed = True
                raise self._error or found
            if isinstance(found, _Lost):
                self._failed = True
                sync()
                self._failed = False
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
        numbers = self.schedule.take()
        if numbers is None:
            return None
        kept = [self._ended[number] for number in numbers]
        left = {*self.schedule.ready, *self.schedule.rejected}
        filtered = [one for number, one in sorted(self._ended.items()) if not one.kept and number not in left]
        for one in (*kept, *filtered):
            del self._ended[one.number]
        self._taken = step, [*kept, *filtered]
        metrics = {"stream/ready": float(len(self.schedule.ready)), "stream/running": float(len(self.schedule.running))}
        self._start()
        every = sorted((*kept, *filtered), key=lambda one: one.number)
        sampled = SampledGroups(
            [one.group for one in every],
            [one.group for one in filtered],
            reduce(ScoreStats.add_round, (one.stats for one in every), ScoreStats()),
        )
        batch = self.collector.end_step([one.group for one in kept], sampled)
        if (trained := _lengths(batch.groups)) and self._lengths:
            metrics["stream/length_bias"] = statistics.fmean(trained) - statistics.fmean(self._lengths)
        self._lengths = []
        self._untrained = batch.untrained  # for the main process's rollout file alone
        return replace(
            batch, untrained=[], metrics=batch.metrics | metrics | staleness(batch.groups, step, self.max_staleness)
        )

    def _start(self) -> None:
        """Start the groups that the schedule wants. Needs `_changed`."""
        for number in [] if self._closing else self.schedule.start():
            self._prompts[number] = self.collector.draw(number)
            run_in_thread(partial(self._guard, partial(self._sample, number)), "rollout")

    # The threads

    def _guard(self, work: Callable[[], None]) -> None:
        """Do the work of a thread, whose error ends the run."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _sample(self, number: int) -> None:
        """Sample one group. Its episodes, if it has any, run in this thread."""
        collector, prompt = self.collector, self._prompts[number]
        request = Request(prompt.token_ids, collector.group_size, derive_seed(collector.seed, number), prompt=prompt)
        listener = Listener(watch=Watch(cancelled=lambda: self._closing))
        (completions,) = collector.sampler.episodes_here.generate([prompt], [request], collector.sampling, listener)
        with self._changed:
            self._arrived.append((number, completions))
            self._changed.notify_all()

    def _score(self) -> None:
        """Score the groups that have arrived, in one call of each reward, and again."""
        collector = self.collector
        scorer = collector.sampler.scorer
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._arrived)
                if self._closing:
                    return
                arrived = dict(self._arrived)
                self._arrived.clear()
            pairs = [(self._prompts[number], completions) for number, completions in arrived.items()]
            scored = collector.sampler.score(pairs, collector.sampling.max_tokens)
            kept = collector.kept([group for group, _ in scored])
            ended = [EndedGroup(*one, keep) for one, keep in zip(scored, kept, strict=True)]
            with self._changed:
                recent = [one.stats for one in (*self._ended.values(), *ended)]
                stats = reduce(ScoreStats.add_round, recent, ScoreStats())
                scorer.check_errors(stats, self.schedule.prompts_per_step * collector.group_size)
                for one in ended:
                    del self._prompts[one.number]
                    self._ended[one.number] = one
                    self.schedule.end(one.number, one.version, one.kept)
                self._lengths += _lengths([one.group for one in ended if one.kept])
                self._start()
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


def _warn_unfit(count: int, what: str) -> None:
    if count:
        logger.warning("%d groups that were sampled ahead %s and are sampled again", count, what)


def _restored(saved: dict[str, Any], draw: Draw, size: int, names: set[str]) -> Group | None:
    prompt = draw(int(saved["draw"]))
    rollouts = [_rollout(prompt, r) for r in saved["rollouts"]]
    same_prompt = prompt.token_ids == saved["prompt_ids"].tolist()
    fits = same_prompt and len(rollouts) == size and all(set(r.rewards) == names for r in rollouts)
    return Group(prompt, rollouts) if fits else None


def _plain(group: Group) -> dict[str, Any]:
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


def _plain_stats(stats: ScoreStats) -> tuple[dict[str, int], float, list[tuple[str, str, tuple[Any, ...]]]]:
    rewards = [(*pair, astuple(counts)) for pair, counts in stats.rewards.items()]
    return dict(stats.samples), stats.seconds, rewards


def _restored_stats(saved: tuple[Any, ...]) -> ScoreStats:
    samples, seconds, rewards = saved
    return ScoreStats(Counter(samples), seconds, {(name, task): RewardStats(*one) for name, task, one in rewards})
