"""The schedule of rollouts: which prompts may start now, and which groups make the next batch.

It has no clock, no thread and no I/O. `Collector` and `RolloutStream` drive it with real completions, and
`plan --simulate` with a simulated clock. A group is the completions of one prompt, and has the number of its prompt's
draw.

With max_staleness 0 a step samples in rounds: the first has as many groups as the step lacks, and the size of a later
one follows the share kept so far.

Above 0 rollouts are a stream: at most (max_staleness + 1) x prompts_per_step groups have started and are not trained,
as in Tinker's cookbook and AReaL (arXiv 2505.24298). Fewer have started while steps find a batch ready anyway: groups
that wait get older, and a queue that never empties is too long (RFC 8289). A step takes groups of the oldest weights
first, and waits for a group that would be too old for a later step. So nothing is thrown away for being slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_REFILL = 4
"""A round samples at most this many times `rollout.prompts_per_step` prompts, however few groups were kept before."""


@dataclass(slots=True)
class Schedule:
    """The groups of a run that have started and are not trained."""

    prompts_per_step: int
    max_staleness: int
    """The largest age in weight versions of a group's oldest token when it trains."""
    steps: int
    """The last step of the run."""
    max_rounds: int = 1
    """Rounds of a step. A stream replaces as many rejected groups as its later rounds could sample."""
    in_order: bool = False
    """A step takes the groups of a stream in the order of their numbers, so that it depends on no clock."""
    carry: bool = False
    """In rounds, the next step trains on groups that were kept and not needed; else they are dropped."""
    step: int = 0
    """The last step that began; its weights are the engine's."""
    draws: int = 0
    """The number of the next new group."""
    restarted: list[int] = field(default_factory=list)
    """Groups that were running when a checkpoint was saved; they start first."""
    running: dict[int, int] = field(default_factory=dict)
    """{number: the weight version that a group began with}."""
    ready: dict[int, int] = field(default_factory=dict)
    """{number: the version of the oldest token} of groups to train on, in the order in which they ended."""
    rejected: list[int] = field(default_factory=list)
    """Groups rejected since the last batch. With `in_order`, also earlier ones behind the last group taken."""
    rounds: int = 0
    """Of this step."""
    wanted: bool = False
    """The step waits for its batch."""
    ahead: int = 1
    """How many later steps a stream samples for: from 1 to max_staleness; see `begin`."""
    spare_steps: int = 0
    """Steps in a row, up to the last one, that found two batches ready."""

    def begin(self, step: int) -> None:
        """A step begins, with its weights in the engine, and wants its batch.

        If it finds no batch ready, the stream runs one step further ahead. If max_staleness + 1 steps in a row find
        two, of which one only gets older, it runs one step less far. With `in_order` ready groups, which depend on a
        clock, decide nothing.
        """
        batches = len(self.ready) // self.prompts_per_step
        self.spare_steps = self.spare_steps + 1 if batches > 1 else 0
        if self.in_order:
            self.ahead = self.max_staleness
        elif not batches:
            self.ahead = min(self.ahead + 1, self.max_staleness)
        elif self.spare_steps > self.max_staleness:
            self.ahead, self.spare_steps = self.ahead - 1, 0
        self.step, self.wanted, self.rounds = step, True, 0

    def start(self) -> list[int]:
        """The groups that start now, with the engine's weights."""
        room = max(0, self._room() if self.max_staleness else self._round())
        again = self.restarted[:room]
        new = range(self.draws, self.draws + room - len(again))
        self.restarted, self.draws = self.restarted[room:], new.stop
        self.running |= dict.fromkeys([*again, *new], self.step)
        return [*again, *new]

    def _round(self) -> int:
        """The number of groups of a step's next round; 0 if the last one runs, or the step samples no more."""
        missing = self.prompts_per_step - len(self.ready)
        if self.running or not self.wanted or missing <= 0 or self.rounds == self.max_rounds:
            return 0
        self.rounds += 1
        if self.rounds == 1:
            return missing
        kept = sum(version == self.step for version in self.ready.values())  # the others are of the step before
        expected = math.ceil(missing * (kept + len(self.rejected)) / max(kept, 1))
        return min(expected, MAX_REFILL * self.prompts_per_step)

    def _room(self) -> int:
        """The number of groups that a stream has room for."""
        steps = min(self.ahead, self.steps - self.step) + self.wanted
        replaced = (self.max_rounds - 1) * MAX_REFILL * self.prompts_per_step
        not_replaced = max(0, len(self.rejected) - replaced)
        return steps * self.prompts_per_step - not_replaced - len(self.running) - len(self.ready)

    def end(self, number: int, version: int, kept: bool) -> None:
        """A running group has ended. version: of its oldest token."""
        del self.running[number]
        if kept:
            self.ready[number] = version
        else:
            self.rejected.append(number)

    def take(self) -> tuple[dict[int, int], list[int]] | None:
        """The groups that the step trains on, as in `ready`, and those rejected before them; None while it waits.

        After many rejections fewer than a batch. Call `start` before, as a step waits only while groups run, and after.
        """
        needed = self.prompts_per_step if self.max_staleness else math.inf  # a round ends first
        if not self.wanted or (self.running and len(self.ready) < needed):
            return None
        age = (lambda number: number) if self.in_order else self.ready.__getitem__
        taken = sorted(self.ready, key=age)[: self.prompts_per_step]  # stable: then in the order in which they ended
        if self.running and not self._may_take(set(taken)):
            return None
        trained = {number: self.ready.pop(number) for number in taken}
        if not self.max_staleness:  # at most a step's worth, which the next step trains on, so none gets older
            fresh = [number for number in sorted(self.ready) if self.ready[number] == self.step]
            self.ready = dict.fromkeys(fresh[: self.prompts_per_step * self.carry], self.step)
        last = max(taken) if self.in_order and len(taken) == self.prompts_per_step else math.inf
        rejected = [number for number in self.rejected if number <= last]
        self.rejected = [number for number in self.rejected if number > last]
        self.wanted = False
        return trained, rejected

    def _may_take(self, taken: set[int]) -> bool:
        """Whether the step may take a whole batch before the others have ended, since none of them gets too old."""
        if self.in_order and min(self.running) < max(taken):
            return False
        ages = [self.step - version for number, version in (self.ready | self.running).items() if number not in taken]
        # after a steps, those that are now older than max_staleness - a have to be trained
        steps = range(min(self.max_staleness, len(ages)))
        return all(sum(age >= self.max_staleness - a for age in ages) <= a * self.prompts_per_step for a in steps)
