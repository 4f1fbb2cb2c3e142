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


def batches_ahead(staleness: int, ended: list[int], in_order: bool = False) -> list[float]:
    """Batches sampled for later steps once each step has its own. ended: those that end during each update."""
    schedule, found = Schedule(2, staleness, 999, in_order=in_order), list[float]()
    for step, count in enumerate(ended, 1):
        schedule.begin(step)
        schedule.start()
        while not schedule.take():
            schedule.end(min(schedule.running), min(schedule.running.values()), kept=True)
        schedule.start()
        found.append((len(schedule.running) + len(schedule.ready)) / 2)
        for number in sorted(schedule.running)[: 2 * count]:
            schedule.end(number, schedule.running[number], kept=True)
    return found


def test_a_stream_runs_no_further_ahead_than_keeps_steps_from_waiting() -> None:
    assert batches_ahead(3, [9] * 20) == [*[2] * 4, *[1] * 16], "each step finds more than one batch ready"
    assert batches_ahead(4, [0] * 6) == [2, 3, 4, 4, 4, 4], "none finds one"
    assert batches_ahead(1, [0] * 6) == [1] * 6
    assert batches_ahead(3, [0, 0, 0, *[9] * 12]) == [2, *[3] * 6, *[2] * 4, *[1] * 4]
    assert batches_ahead(5, [0, *[1] * 20]) == [2, *[3] * 20], "one ready batch is enough, and not too many"
    assert batches_ahead(5, [0, *[2, 0] * 10]) == [2, *[3] * 20], "two now and then are not too many"
    assert batches_ahead(3, [9] * 6, in_order=True) == [3] * 6, "whatever has ended"


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
