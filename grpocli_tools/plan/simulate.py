"""A discrete-event simulation of a run: when servers generate, when trainers update, and who waits for whom.

Events are completions, rewards, syncs and updates, not tokens. Between two completions of a server, all its running
sequences advance one token in `Speeds.decode[n]` seconds. The trainer's own `Schedule` decides what is sampled. The
same seed gives the same run.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from grpocli.errors import ConfigError
from grpocli.rollout.sampling import derive_seed
from grpocli.training.schedule import Schedule

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

    values: NDArray[np.int64]

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        return random.choice(self.values, count)

    @property
    def mean(self) -> float:
        return float(self.values.mean())


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of the parts of a step."""

    decode: Sequence[float]
    """For a token of each of n sequences of a server, by n from 0."""
    round: float = 0.0
    """Of a step's prompts and requests, beside decoding."""
    reward: float = 0.0
    """From a step's last completion to its last score."""
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
    in_order: bool = True
    """Whether a step takes groups in the order of their prompts."""
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
class SimulatedStep:
    """A step of the run without failures."""

    seconds: float
    train: float
    """Seconds of the update."""
    age: int
    """Of the oldest weights that sampled its rollouts."""
    busy: float
    """Seconds of generation meanwhile, added over the servers."""
    trained: int
    """Tokens of the completions that are trained on."""


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
        busy = self._mean([step.busy for step in self.steps]) / self.job.servers
        return max(0.0, 1 - busy / self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens of completions per second, without failures."""
        return self._mean([step.trained for step in self.steps]) / self.step_seconds

    @property
    def max_age(self) -> int:
        return max(step.age for step in self.steps)

    def _mean(self, values: Sequence[float]) -> float:
        """The mean over the steps without the first ones, which begin with little collected."""
        return float(np.mean(values[min(1 + self.job.max_staleness, len(values) - 1) :]))


def simulate(job: Job, steps: int, seed: int = 0, run_steps: int | None = None) -> Simulated:
    """Simulate steps of a run, and the checkpoints and failures of `run_steps` like them; None: of the same steps.

    Raises ConfigError if failures come faster than checkpoints.
    """
    run = _Run(job, seed, steps)
    done = tuple(run.step(number) for number in range(1, steps + 1))
    whole = [done[n % steps].seconds for n in range(run_steps or steps)]
    seconds, lost, failures = _with_failures(job, whole)
    return Simulated(job, done, seconds, 1 - sum(whole) / seconds, lost, failures)


@dataclass(slots=True)
class Server:
    """A server, between two of whose events all running sequences advance at the same pace."""

    slots: int
    decode: Sequence[float]
    now: float = 0.0
    position: float = 0.0
    """Tokens of a sequence that runs from the start."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """A heap of the positions at which sequences end, with their groups."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Lengths of sequences without a slot, with their groups."""
    busy: float = 0.0

    def add(self, group: int, lengths: NDArray[np.int64]) -> None:
        self.waiting += [(int(length), group) for length in lengths]
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (self.position + length, group))

    @property
    def next_end(self) -> float:
        if not self.running:
            return math.inf
        return self.now + (self.running[0][0] - self.position) * self.decode[len(self.running)]

    def run_until(self, time: float) -> None:
        """Advance to a time before the next end."""
        if time > self.now:
            if self.running:
                self.position += (time - self.now) / self.decode[len(self.running)]
                self.busy += time - self.now
            self.now = time

    def end_next(self) -> int:
        """Advance to the next end; the group of the sequence that ended."""
        end = self.next_end
        self.busy += end - self.now
        self.now = end
        self.position, group = heapq.heappop(self.running)
        self._fill()
        return group


class _Run:
    """`Schedule` with simulated servers, as `Collector` and `RolloutStream` with real ones.

    A group's prompts take their share of `Speeds.round` on its server, which decodes nothing meanwhile. In a stream its
    rewards take their share of `Speeds.reward`, beside the servers.
    """

    def __init__(self, job: Job, seed: int, steps: int) -> None:
        self.job, self.seed, self.now = job, seed, 0.0
        self.servers = [Server(job.slots, job.speeds.decode) for _ in range(job.servers)]
        self.ends = np.full(job.servers, math.inf)
        """`next_end` of each server; an array, because an event looks at the least of them."""
        self.schedule = Schedule(job.prompts, job.max_staleness, steps, job.rounds, job.in_order, job.carry)
        self.reward = job.speeds.reward / (job.prompts if job.max_staleness else 1)
        """Seconds from a group's last completion to its scores."""
        self.groups: dict[int, tuple[int, bool]] = {}
        """Tokens of each group's completions, and whether the algorithm keeps it."""
        self.left: Counter[int] = Counter()
        """Completions of each group that have not ended."""
        self.scored: deque[tuple[float, int]] = deque()
        """When the rewards of groups are there, in order."""

    def step(self, number: int) -> SimulatedStep:
        schedule, speeds, start = self.schedule, self.job.speeds, self.now
        busy = sum(server.busy for server in self.servers)
        while not self.job.in_flight and schedule.running:
            self._next_event()
        self._run_to(self.now)
        self.now += speeds.sync
        for server in self.servers:  # requests stand still during the sync
            server.now = max(server.now, self.now)
        self.ends[:] = [server.next_end for server in self.servers]
        schedule.begin(number)
        self._start()
        while (found := schedule.take()) is None:
            self._next_event()
        self._start()
        taken, _ = found
        trained = sum(self.groups.pop(one)[0] for one in taken)
        age = max((number - version for version in taken.values()), default=0)
        train = speeds.update + speeds.update_token * (trained + len(taken) * self.job.prompt_tokens)
        self._run_to(self.now + train)
        busy = sum(server.busy for server in self.servers) - busy
        return SimulatedStep(self.now - start, train, age, busy, trained)

    def _start(self) -> None:
        job = self.job
        for number in self.schedule.start():
            random = np.random.default_rng(derive_seed(self.seed, number))
            lengths = job.lengths.draw(random, job.group)
            self.groups[number], self.left[number] = (int(lengths.sum()), random.random() < job.kept), job.group
            least = int(np.argmin([len(server.running) + len(server.waiting) for server in self.servers]))
            server = self.servers[least]
            server.run_until(self.now)
            server.now += job.speeds.round * job.servers / job.prompts
            server.add(number, lengths)
            self.ends[least] = server.next_end

    def _run_to(self, time: float) -> None:
        """Let the servers generate until a time."""
        while self._next_time <= time:
            self._next_event()
        for server in self.servers:
            server.run_until(time)
        self.now = time

    @property
    def _next_time(self) -> float:
        scored = self.scored[0][0] if self.scored else math.inf
        return min(scored, float(self.ends.min()))

    def _next_event(self) -> None:
        """A completion ends, or the rewards of a group are there."""
        self.now = max(self.now, self._next_time)
        if self.scored and self.scored[0][0] <= self.now:
            _, number = self.scored.popleft()
            self.schedule.end(number, self.schedule.running[number], self.groups[number][1])
            self._start()
        else:
            first = int(self.ends.argmin())
            group = self.servers[first].end_next()
            self.ends[first] = self.servers[first].next_end
            self.left[group] -= 1
            if not self.left[group]:
                self.scored.append((self.now + self.reward, group))


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
