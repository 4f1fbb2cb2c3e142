"""A discrete-event simulation of a run: when servers generate, when trainers update, and who waits for whom.

Events are completions, rounds of sampling, syncs, updates, checkpoints and failures, not tokens. Between two
completions of a server, all its running sequences advance one token in `Speeds.decode[n]` seconds. A step's rollouts
are sampled in rounds as `Collector` does, and the two threads take turns as in `Prefetcher`. The same seed gives the
same run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from grpocli.errors import ConfigError
from grpocli.rollout.sampling import derive_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REFILL = 4
"""As in `grpocli.training.collector`."""
ATTEMPTS = 100
"""A run whose steps are attempted more often than this on average cannot get past its failures."""


class Lengths(Protocol):
    """Draws the numbers of tokens of completions."""

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]: ...

    @property
    def mean(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths around a mean; log-normal, cut at the longest.

    typical: the mean before the cut. spread: the standard deviation divided by it. longest: tokens.
    """

    typical: float
    spread: float
    longest: int

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        variance = math.log1p(self.spread**2)
        drawn = random.lognormal(math.log(self.typical) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)

    @property
    def mean(self) -> float:
        return float(self.draw(np.random.default_rng(0), 20_000).mean())

    @classmethod
    def with_mean(cls, mean: float, spread: float, longest: int) -> LogNormal:
        """The lengths whose mean after the cut is `mean`, found by halving an interval."""
        low, high = mean, 1000.0 * longest
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cls(middle, spread, longest).mean < mean else (low, middle)
        return cls(low, spread, longest)


@dataclass(frozen=True, slots=True)
class Observed:
    """Lengths of another run's completions, drawn with replacement."""

    values: tuple[int, ...]

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        return random.choice(np.asarray(self.values, dtype=np.int64), count)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of the parts of a step.

    decode: for a token of each of n sequences of a server, by n from 0. round: of a round of sampling beside decoding:
    prompts, requests. reward: after the last completion of a round. update, update_token: of an update, and for each
    token of prompts and completions that all trainers compute. sync: of sending the weights.
    """

    decode: Sequence[float]
    round: float = 0.0
    reward: float = 0.0
    update: float = 0.0
    update_token: float = 0.0
    sync: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Failures of devices, and checkpoints.

    per_hour: failures of a device in an hour. every: steps between checkpoints; 0: none, so a failure starts again.
    save: seconds that training waits for a checkpoint. restart: seconds until a run trains again after a failure of a
    trainer. server_restart: until a server generates again; the others wait with it.
    """

    per_hour: float = 0.0
    every: int = 0
    save: float = 0.0
    restart: float = 600.0
    server_restart: float = 180.0


@dataclass(frozen=True, slots=True)
class Job:
    """A run to simulate.

    prompts, group, prompt_tokens: of a step. servers: copies of the model. slots: sequences of a server at a time.
    trainers, rollout_devices: devices; shared: they are the same ones. kept: share of groups that the algorithm keeps.
    rounds: most rounds of sampling in a step. carry: whether surplus groups are kept for the next step.
    """

    prompts: int
    group: int
    prompt_tokens: float
    lengths: Lengths
    speeds: Speeds
    servers: int
    slots: int
    trainers: int
    rollout_devices: int
    shared: bool = False
    max_staleness: int = 0
    in_flight: bool = False
    kept: float = 1.0
    rounds: int = 1
    carry: bool = False
    faults: Faults = Faults()

    @property
    def devices(self) -> int:
        return self.trainers if self.shared else self.trainers + self.rollout_devices


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of one step.

    seconds: to collect them. busy: seconds of generation, added over the servers. generated, trained: tokens of
    completions. leftover: tokens of groups kept for the next step. events: completions and rounds.
    """

    seconds: float
    busy: float
    generated: int
    trained: int
    rows: int
    groups: int
    rounds: int
    leftover: int
    events: int


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Times of a step, in seconds since the start of the run without failures.

    start, end: of the step. wait: for rollouts. train: of the update. age: of the weights that sampled its rollouts.
    """

    start: float
    end: float
    wait: float
    train: float
    age: int
    batch: Batch

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result.

    seconds: of the whole run with failures and checkpoints. overhead: share of them that these take. lost: seconds that
    failures alone take.
    """

    job: Job
    steps: tuple[SimulatedStep, ...]
    seconds: float
    overhead: float
    lost: float
    failures: int
    events: int

    @property
    def measured(self) -> tuple[SimulatedStep, ...]:
        """The steps without the first ones, before which nothing was collected."""
        return self.steps[min(1 + self.job.max_staleness, len(self.steps) - 1) :]

    @property
    def step_seconds(self) -> float:
        """The mean of the measured steps, without failures."""
        return float(np.mean([step.seconds for step in self.measured]))

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which trainers do not update."""
        return 1 - float(np.mean([step.train for step in self.measured])) / self.step_seconds

    @property
    def rollout_idle(self) -> float:
        """Share of the time in which servers do not generate."""
        busy = float(np.mean([step.batch.busy for step in self.measured])) / self.job.servers
        return max(0.0, 1 - busy / self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens of completions per second, without failures."""
        return float(np.mean([step.batch.trained for step in self.measured])) / self.step_seconds

    @property
    def max_age(self) -> int:
        return max(step.age for step in self.steps)


def simulate(job: Job, steps: int, seed: int = 0, run_steps: int | None = None) -> Simulated:
    """Simulate steps of a run, and the checkpoints and failures of `run_steps` like them; None: of the same steps.

    Raises ConfigError if failures come faster than checkpoints.
    """
    timeline = _Timeline(job, seed)
    done = tuple(timeline.step(number) for number in range(1, steps + 1))
    whole = done if run_steps is None else tuple(done[n % steps] for n in range(run_steps))
    seconds, lost, failures, attempts = _with_failures(job, whole, seed)
    useful, events = sum(step.seconds for step in whole), sum(step.batch.events for step in done)
    return Simulated(job, done, seconds, 1 - useful / seconds, lost, failures, events + attempts)


def generate(lengths: NDArray[np.int64], servers: int, slots: int, decode: Sequence[float]) -> tuple[float, float]:
    """Seconds until all completions [P, G] are done, and seconds of generation added over the servers.

    A group goes to the server with the fewest completions, which starts as many as it has slots and queues the rest.
    """
    shares = [lengths[first::servers].ravel() for first in range(min(servers, len(lengths)))]
    seconds = [_drain(share, decode) if len(share) <= slots else _queue(share, slots, decode) for share in shares]
    return max(seconds), sum(seconds)


def _drain(lengths: NDArray[np.int64], decode: Sequence[float]) -> float:
    """Seconds of a server whose sequences all start at once: they end in the order of their lengths."""
    ordered = np.sort(lengths)
    each = np.asarray(decode)[len(ordered) : 0 : -1]
    return float(np.diff(ordered, prepend=0) @ each)


def _queue(lengths: NDArray[np.int64], slots: int, decode: Sequence[float]) -> float:
    """Seconds of a server on which a sequence starts when another one ends."""
    ends = [int(length) for length in lengths[:slots]]
    heapq.heapify(ends)
    now, seconds = 0, 0.0
    for length in lengths[slots:]:
        first = ends[0]
        seconds += (first - now) * decode[slots]
        now = first
        heapq.heapreplace(ends, now + int(length))
    return seconds + _drain(np.asarray(ends) - now, decode)


@dataclass(slots=True)
class _Timeline:
    """The two threads of a run: one trains, the other collects the batches of the steps in order."""

    job: Job
    seed: int
    now: float = 0.0
    free: float = 0.0
    """When the collecting thread may begin its next batch."""
    requested: int = 0
    collected: int = 0
    synced: list[tuple[float, int]] = field(default_factory=list)
    """When each weight version reached the servers."""
    ready: deque[tuple[float, int, Batch]] = field(default_factory=deque)
    """Batches with the time at which they are collected and the version that sampled them."""
    leftover: NDArray[np.int64] | None = None

    def step(self, number: int) -> SimulatedStep:
        job, start = self.job, self.now
        wait = self._sync(number)
        self.requested = number + job.max_staleness
        self._collect(through=number)
        done, version, batch = self.ready.popleft()
        wait += max(0.0, done - self.now)
        self.now = max(self.now, done)
        train = self._train_seconds(batch)
        self.now += train
        return SimulatedStep(start, self.now, wait, train, number - version, batch)

    def _sync(self, number: int) -> float:
        """Send the weights. Returns the seconds waited for batches that were begun before."""
        job, wait = self.job, 0.0
        self._collect(before=self.now)
        if self.collected and not job.in_flight and job.max_staleness:
            self._collect(through=min(number, self.requested))
            wait = max(0.0, self.free - self.now)
            self.now += wait
        start = self.now
        self.now += job.speeds.sync
        self.synced.append((self.now, number))
        if self.free > start and self.ready:  # in flight: generation stands still during the sync
            done, version, batch = self.ready.pop()
            self.ready.append((done + job.speeds.sync, version, batch))
            self.free += job.speeds.sync
        self.free = max(self.free, self.now)
        return wait

    def _collect(self, through: int = 0, before: float = -math.inf) -> None:
        """Collect the requested batches up to number `through`, and further ones that begin before a time."""
        while self.collected < self.requested and (self.collected < through or self.free < before):
            self.collected += 1
            begin = self.free
            version = next((version for time, version in reversed(self.synced) if time <= begin), 1)
            batch = self._batch(self.collected)
            self.free = begin + batch.seconds
            self.ready.append((self.free, version, batch))

    def _train_seconds(self, batch: Batch) -> float:
        speeds = self.job.speeds
        prompts = batch.groups * self.job.prompt_tokens
        return speeds.update + speeds.update_token * (batch.trained + prompts)

    def _batch(self, number: int) -> Batch:
        """The rollouts of a step, in rounds until enough groups are kept."""
        job, random = self.job, np.random.default_rng(derive_seed(self.seed, number))
        have = self.leftover if self.leftover is not None else np.zeros((0, job.group), dtype=np.int64)
        carried = len(have)
        missing = job.prompts - carried
        seconds = busy = 0.0
        sampled = generated = kept = rounds = 0
        found: list[NDArray[np.int64]] = [have]
        while kept < missing and rounds < job.rounds:
            wanted = _refill(missing - kept, sampled, kept, job.prompts)
            lengths = job.lengths.draw(random, wanted * job.group).reshape(wanted, job.group)
            took, worked = generate(lengths, job.servers, job.slots, job.speeds.decode)
            good = lengths[random.random(wanted) < job.kept]
            seconds += job.speeds.round + took + job.speeds.reward
            busy += worked
            sampled, kept, rounds = sampled + wanted, kept + len(good), rounds + 1
            generated += int(lengths.sum())
            found.append(good)
        groups = np.concatenate(found)
        surplus = groups[job.prompts :][: job.prompts] if job.carry else groups[:0]
        self.leftover = surplus if len(surplus) else None
        trained = groups[: job.prompts]
        events = sampled * job.group + rounds
        return Batch(
            seconds, busy, generated, int(trained.sum()), trained.size, len(trained), rounds, int(surplus.sum()), events
        )


def _refill(missing: int, sampled: int, kept: int, prompts: int) -> int:
    """The prompts of the next round, by the share of groups kept in this step, as in `Collector._refill`."""
    if not sampled:
        return missing
    return min(math.ceil(missing * sampled / max(kept, 1)), MAX_REFILL * prompts)


def _with_failures(job: Job, steps: Sequence[SimulatedStep], seed: int) -> tuple[float, float, int, int]:
    """Seconds of the run with checkpoints and failures, of these lost, failures, and attempts at steps.

    A trainer's failure goes back to the last checkpoint; the steps after it are repeated. A server's failure makes its
    step longer, since the run goes on with the others and waits for the requests that are sent again.
    """
    faults, random = job.faults, np.random.default_rng(derive_seed(seed, 0))
    rate = faults.per_hour / 3600 * job.devices
    servers_share = 0.0 if job.shared else job.rollout_devices / job.devices
    useful = sum(step.seconds for step in steps)
    now = saves = 0.0
    failures = attempts = done = saved = 0
    next_failure = random.exponential(1 / rate) if rate else math.inf
    while done < len(steps):
        attempts += 1
        if attempts > ATTEMPTS * len(steps):
            raise ConfigError(
                f"--failures {faults.per_hour:g}: one in {1 / rate:.3g} s is more often than the run saves and "
                "restarts; lower it, or checkpoint.every"
            )
        due = bool(faults.every) and (done + 1) % faults.every == 0
        end = now + steps[done].seconds + (faults.save if due else 0.0)
        while next_failure < end and random.random() < servers_share:
            failures += 1
            end += faults.server_restart
            next_failure += random.exponential(1 / rate)
        if next_failure < end:
            failures += 1
            now, done = next_failure + faults.restart, saved
            next_failure = now + random.exponential(1 / rate)
            continue
        now, done = end, done + 1
        if due:
            saved, saves = done, saves + faults.save
    return now, now - useful - saves, failures, attempts
