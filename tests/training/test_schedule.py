"""The schedule of streamed rollouts under any order in which groups end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpocli.training.schedule import Schedule

SHAPES = [(1, 1), (2, 1), (4, 1), (3, 2), (4, 4)]


@dataclass
class Driven:
    """A run that a random number drives; `weights` of the chances to end a group early."""

    schedule: Schedule
    kept: float = 1.0
    seed: int = 0
    in_flight: bool = True
    batches: list[list[int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)

    def run(self, first: int, last: int) -> Driven:
        chance = random.Random(self.seed)
        schedule = self.schedule
        for step in range(first, last + 1):
            while not self.in_flight and schedule.running:
                self._end(chance)
                schedule.start()
            schedule.begin(step)
            while True:
                schedule.start()
                most = (schedule.max_staleness + 1) * schedule.prompts_per_step
                assert len(schedule.running) + len(schedule.ready) <= most
                if (found := schedule.take()) is not None:
                    break
                assert schedule.running, "nothing runs, and the step waits"
                self._end(chance)
            taken, rejected = found
            self.ages += [step - version for version in taken.values()]
            self.versions |= taken
            self.batches.append([*taken])
            self.rejected += rejected
            schedule.start()
            for _ in range(chance.randrange(len(schedule.running) + 1)):  # while the step trains
                self._end(chance)
                schedule.start()
        return self

    def _end(self, chance: random.Random) -> None:
        number = chance.choice(sorted(self.schedule.running))
        kept = random.Random(number).random() < self.kept
        self.schedule.end(number, self.schedule.running[number], kept)

    @property
    def trained(self) -> list[int]:
        return [number for batch in self.batches for number in batch]


def driven(prompts: int, staleness: int, steps: int, *, kept: float = 1.0, rounds: int = 10**6, **more) -> Driven:
    in_order = more.pop("in_order", False)
    return Driven(Schedule(prompts, staleness, steps, rounds, in_order), kept, **more).run(1, steps)


@given(st.sampled_from(SHAPES), st.integers(0, 9999), st.sampled_from([1.0, 0.5, 0.2]), st.booleans(), st.booleans())
def test_no_group_is_too_old_or_lost_or_trained_twice(
    shape: tuple[int, int], seed: int, kept: float, in_order: bool, in_flight: bool
) -> None:
    prompts, staleness = shape
    done = driven(prompts, staleness, 12, kept=kept, seed=seed, in_order=in_order, in_flight=in_flight)
    assert {len(batch) for batch in done.batches} == {prompts}
    assert max(done.ages) <= staleness
    assert sorted([*done.trained, *done.rejected, *done.schedule.rejected]) == list(range(done.schedule.draws))
    assert not done.schedule.running | done.schedule.ready, "nothing is sampled for steps after the last"


def test_a_slow_group_does_not_hold_up_the_next_batches() -> None:
    schedule = Schedule(2, 2, 9, ahead=2)
    schedule.begin(1)
    assert schedule.start() == [0, 1, 2, 3, 4, 5]
    for number in (1, 2, 3):
        schedule.end(number, 1, kept=True)
    assert schedule.take() == ({1: 1, 2: 1}, []), "those that ended first"
    assert schedule.start() == [], "a batch trains, so as many groups as two later steps need have started"
    schedule.begin(2)
    assert schedule.start() == [6, 7]
    for number in (4, 6):
        schedule.end(number, schedule.running[number], kept=True)
    assert schedule.take() == ({3: 1, 4: 1}, [])
    schedule.begin(3)
    schedule.start()
    schedule.end(7, 2, kept=True)
    assert schedule.take() is None, "groups 0 and 5 would be too old for step 4"
    schedule.end(5, 1, kept=True)
    assert schedule.take() is None
    schedule.end(0, 1, kept=True)
    assert schedule.take() == ({5: 1, 0: 1}, [])


def aheads(staleness: int, steps: int, busy: range) -> list[int]:
    """`Schedule.ahead` of each step. busy: steps during whose update no group ends; in others all of them do."""
    schedule, found = Schedule(2, staleness, 999), list[int]()
    for step in range(1, steps + 1):
        schedule.begin(step)
        schedule.start()
        while not schedule.take():
            schedule.end(min(schedule.running), step, kept=True)
        schedule.start()
        for number in [] if step in busy else [*schedule.running]:
            schedule.end(number, step, kept=True)
        found.append(schedule.ahead)
    return found


def test_a_stream_runs_ahead_as_far_as_steps_would_wait_otherwise() -> None:
    assert aheads(3, 20, range(0)) == [1] * 20, "each step finds a batch ready"
    assert aheads(3, 6, range(99)) == [1, 2, 3, 3, 3, 3], "none does"
    assert aheads(1, 6, range(99)) == [1] * 6
    assert aheads(3, 20, range(1, 4)) == [1, 2, 3, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("kept", "rounds"), [(1.0, 1), (0.4, 99), (0.5, 1), (0.1, 2), (0.0, 2)])
def test_in_order_and_without_running_groups_at_a_sync_no_clock_decides(kept: float, rounds: int) -> None:
    runs = [driven(3, 2, 8, kept=kept, rounds=rounds, seed=seed, in_order=True, in_flight=False) for seed in range(20)]
    assert len({str((run.batches, run.versions, sorted(run.rejected))) for run in runs}) == 1
    assert runs[0].trained == sorted(runs[0].trained)
    assert len({str(driven(3, 2, 8, seed=seed).batches) for seed in range(20)}) > 1


def test_after_many_rejections_a_batch_is_smaller() -> None:
    done = driven(4, 1, 3, kept=0.0, rounds=2)
    assert done.batches == [[], [], []]
    assert len(done.rejected) <= 3 * (4 * 4 + 2 * 4)
    some = driven(4, 1, 30, kept=0.1, rounds=2)
    assert {len(batch) for batch in some.batches} > {4}


@given(st.sampled_from(SHAPES), st.integers(0, 9999), st.integers(1, 11))
def test_a_restored_run_goes_on_with_every_group(shape: tuple[int, int], seed: int, done: int) -> None:
    prompts, staleness = shape
    first = Driven(Schedule(prompts, staleness, 12, 10**6), 0.6, seed).run(1, done)
    saved = first.schedule
    second = Schedule(prompts, staleness, 12, 10**6, step=done)
    second.draws, second.restarted = saved.draws, sorted(saved.running)
    second.ready, second.rejected = dict(saved.ready), list(saved.rejected)
    rest = Driven(second, 0.6, seed + 1).run(done + 1, 12)
    assert max(first.ages + rest.ages) <= staleness
    every = [*first.trained, *first.rejected, *rest.trained, *rest.rejected]
    assert sorted(every) == list(range(second.draws))
