"""A discrete-event simulation of a run: when servers generate, when trainers update, and who waits for whom.

Events are completions, rounds of sampling, syncs and updates, not tokens. Between two
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
from typing import TYPE_CHECKING

import numpy as np

from grpocli.errors import ConfigError
from grpocli.rollout.sampling import derive_seed
from grpocli.training.collector import MAX_REFILL

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Numbers of tokens around a mean; log-normal, cut at the longest."""

    typical: float
    """The mean before the cut."""
    spread: float
    """The standard deviation divided by it."""
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
    """The tokens of another run's completions, drawn with replacement."""

    values: tuple[int, ...]

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        return random.choice(np.asarray(self.values, dtype=np.int64), count)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of the parts of a step."""

    decode: Sequence[float]
    """For a token of each of n sequences of a server, by n from 0."""
    round: float = 0.0
    """Of a round of sampling beside decoding: prompts, requests."""
    reward: float = 0.0
    """After the last completion of a round."""
    update: float = 0.0
    update_token: float = 0.0
    """Of an update, for each token of prompts and completions that all trainers compute."""
    sync: float = 0.0
    """Of sending the weights."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Failures of devices, and checkpoints."""

    per_hour: float = 0.0
    """Failures of a device in an hour."""
    every: int = 0
    """Steps between checkpoints; 0: none, so a failure starts again."""
    save: float = 0.0
    """Seconds that training waits for a checkpoint."""
    restart: float = 600.0
    """Seconds until a run trains again after a failure of a trainer."""
    server_restart: float = 180.0
    """Seconds until a server generates again; the others wait with it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to simulate."""

    prompts: int
    """Of a step."""
    group: int
    prompt_tokens: float
    """Those of a group's prompts that the update computes."""
    lengths: LogNormal | Observed
    speeds: Speeds
    servers: int
    """Copies of the model that generate."""
    slots: int
    """Sequences of a server at a time."""
    trainers: int
    rollout_devices: int
    shared: bool = False
    """Whether trainers and servers have the same devices."""
    max_staleness: int = 0
    in_flight: bool = False
    kept: float = 1.0
    """The share of groups that the algorithm keeps."""
    rounds: int = 1
    """The most rounds of sampling in a step."""
    carry: bool = False
    """Whether surplus groups are kept for the next step."""
    faults: Faults = Faults()

    @property
    def devices(self) -> int:
        return self.trainers if self.shared else self.trainers + self.rollout_devices


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of one step."""

    seconds: float
    """To collect them."""
    busy: float
    """Seconds of generation, added over the servers."""
    generated: int
    """Tokens of all completions."""
    trained: int
    """Tokens of the completions that are trained on."""
    groups: int
    leftover: int
    """Tokens of groups kept for the next step."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Times of a step, in seconds since the start of the run without failures."""

    start: float
    end: float
    train: float
    """Seconds of the update."""
    age: int
    """Of the weights that sampled its rollouts."""
    batch: Batch

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated run."""

    job: Job
    steps: tuple[SimulatedStep, ...]
    seconds: float
    """Of the whole run, with failures and checkpoints."""
    overhead: float
    """The share of them that failures and checkpoints take."""
    lost: float
    """Seconds that failures alone take."""
    failures: float
    """Expected ones."""

    @property
    def step_seconds(self) -> float:
        """The mean of the measured steps, without failures."""
        return self._mean([step.seconds for step in self.steps])

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which trainers do not update."""
        return 1 - self._mean([step.train for step in self.steps]) / self.step_seconds

    @property
    def rollout_idle(self) -> float:
        """Share of the time in which servers do not generate."""
        busy = self._mean([step.batch.busy for step in self.steps]) / self.job.servers
        return max(0.0, 1 - busy / self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens of completions per second, without failures."""
        return self._mean([step.batch.trained for step in self.steps]) / self.step_seconds

    @property
    def max_age(self) -> int:
        return max(step.age for step in self.steps)

    def _mean(self, values: Sequence[float]) -> float:
        """The mean over the steps without the first ones, before which nothing was collected."""
        return float(np.mean(values[min(1 + self.job.max_staleness, len(values) - 1) :]))


def simulate(job: Job, steps: int, seed: int = 0, run_steps: int | None = None) -> Simulated:
    """Simulate steps of a run, and the checkpoints and failures of `run_steps` like them; None: of the same steps.

    Raises ConfigError if failures come faster than checkpoints.
    """
    timeline = _Timeline(job, seed)
    done = tuple(timeline.step(number) for number in range(1, steps + 1))
    whole = [done[n % steps].seconds for n in range(run_steps or steps)]
    seconds, lost, failures = _with_failures(job, whole)
    return Simulated(job, done, seconds, 1 - sum(whole) / seconds, lost, failures)


def generate(lengths: NDArray[np.int64], servers: int, slots: int, decode: Sequence[float]) -> tuple[float, float]:
    """Seconds until all completions [P, G] are done, and seconds of generation added over the servers.

    A group goes to the server with the fewest completions, which starts as many as it has slots and queues the rest.
    """
    shares = [lengths[first::servers].ravel() for first in range(min(servers, len(lengths)))]
    seconds = [_serve(share, slots, decode) for share in shares]
    return max(seconds), sum(seconds)


def _serve(lengths: NDArray[np.int64], slots: int, decode: Sequence[float]) -> float:
    """Seconds of a server on which a sequence starts when another one ends; at last they end in order of length."""
    ends = [int(length) for length in lengths[:slots]]
    heapq.heapify(ends)
    now, seconds = 0, 0.0
    for length in lengths[slots:]:
        first = ends[0]
        seconds += (first - now) * decode[slots]
        now = first
        heapq.heapreplace(ends, now + int(length))
    left = np.sort(np.asarray(ends) - now)
    return seconds + float(np.diff(left, prepend=0) @ np.asarray(decode)[len(left) : 0 : -1])


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
        job, speeds, start = self.job, self.job.speeds, self.now
        self._sync(number)
        self.requested = number + job.max_staleness
        self._collect(through=number)
        done, version, batch = self.ready.popleft()
        train = speeds.update + speeds.update_token * (batch.trained + batch.groups * job.prompt_tokens)
        self.now = max(self.now, done) + train
        return SimulatedStep(start, self.now, train, number - version, batch)

    def _sync(self, number: int) -> None:
        """Send the weights, after the batches that were begun before unless they may change in flight."""
        job = self.job
        self._collect(before=self.now)
        if self.collected and not job.in_flight and job.max_staleness:
            self._collect(through=min(number, self.requested))
            self.now = max(self.now, self.free)
        start = self.now
        self.now += job.speeds.sync
        self.synced.append((self.now, number))
        if self.free > start and self.ready:  # in flight: generation stands still during the sync
            done, version, batch = self.ready.pop()
            self.ready.append((done + job.speeds.sync, version, batch))
            self.free += job.speeds.sync
        self.free = max(self.free, self.now)

    def _collect(self, through: int = 0, before: float = -math.inf) -> None:
        """Collect the requested batches up to number `through`, and further ones that begin before a time."""
        while self.collected < self.requested and (self.collected < through or self.free < before):
            self.collected += 1
            version = next((version for time, version in reversed(self.synced) if time <= self.free), 1)
            batch = self._batch(self.collected)
            self.free += batch.seconds
            self.ready.append((self.free, version, batch))

    def _batch(self, number: int) -> Batch:
        """The rollouts of a step, in rounds until enough groups are kept: see `Collector._sample`."""
        job, random = self.job, np.random.default_rng(derive_seed(self.seed, number))
        found = [self.leftover if self.leftover is not None else np.zeros((0, job.group), dtype=np.int64)]
        missing = job.prompts - len(found[0])
        seconds = busy = 0.0
        sampled = generated = kept = rounds = 0
        while kept < missing and rounds < job.rounds:
            wanted = missing
            if sampled:
                wanted = min(math.ceil((missing - kept) * sampled / max(kept, 1)), MAX_REFILL * job.prompts)
            lengths = job.lengths.draw(random, wanted * job.group).reshape(wanted, job.group)
            took, worked = generate(lengths, job.servers, job.slots, job.speeds.decode)
            found.append(lengths[random.random(wanted) < job.kept])
            seconds += job.speeds.round + took + job.speeds.reward
            busy, generated = busy + worked, generated + int(lengths.sum())
            sampled, kept, rounds = sampled + wanted, kept + len(found[-1]), rounds + 1
        groups = np.concatenate(found)
        trained, surplus = groups[: job.prompts], groups[job.prompts : 2 * job.prompts if job.carry else job.prompts]
        self.leftover = surplus if len(surplus) else None
        return Batch(seconds, busy, generated, int(trained.sum()), len(trained), int(surplus.sum()))


def _with_failures(job: Job, steps: Sequence[float]) -> tuple[float, float, float]:
    """Expected seconds of the run with checkpoints and failures, seconds lost to failures, and failures.

    steps: seconds of each. A trainer's failure repeats half of an interval between checkpoints on average; a server's
    makes its step longer, since the run goes on with the others and waits for the requests that are sent again.
    """
    faults, useful = job.faults, sum(steps)
    saves = len(steps) // faults.every * faults.save if faults.every else 0.0
    interval = (useful + saves) * min(1.0, faults.every / len(steps)) if faults.every else useful
    servers = 0 if job.shared else job.rollout_devices
    of_a_trainer, of_a_server = interval / 2 + faults.restart, faults.server_restart
    rate = faults.per_hour / 3600
    share = rate * ((job.devices - servers) * of_a_trainer + servers * of_a_server)  # of the time, lost to failures
    if share >= 1:
        problem = "failures take more time than the run has between them"
        raise ConfigError(problem, key="--failures", value=faults.per_hour, hint="lower it, or checkpoint.every")
    seconds = (useful + saves) / (1 - share)
    return seconds, share * seconds, rate * job.devices * seconds
