"""The simulation of a run: laws that hold for every cluster, and cases with a result known from arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from grpocli.errors import ConfigError
from grpocli_tools.plan.simulate import Faults, Job, LogNormal, Speeds, generate, simulate

LENGTHS = LogNormal(300.0, 0.8, 1000)
DECODE = [0.0, *(0.01 + 0.0001 * n for n in range(1, 257))]
JOB = Job(
    prompts=16,
    group=8,
    prompt_tokens=10.0,
    lengths=LENGTHS,
    speeds=Speeds(decode=DECODE, round=0.2, reward=0.1, update=0.3, update_token=1e-4, sync=0.5),
    servers=4,
    slots=256,
    trainers=4,
    rollout_devices=4,
)
MODES = [
    replace(JOB, max_staleness=age, in_flight=flight, kept=kept, rounds=rounds, carry=carry)
    for (age, flight), (kept, rounds, carry) in itertools.product(
        [(0, False), (1, False), (1, True), (3, False), (3, True)], [(1.0, 1, False), (0.5, 10, False), (0.5, 10, True)]
    )
]


@pytest.mark.parametrize("job", MODES)
def test_every_token_generated_is_trained_kept_for_later_or_filtered(job: Job) -> None:
    steps = simulate(job, 8).steps
    generated = sum(step.batch.generated for step in steps)
    trained = sum(step.batch.trained for step in steps)
    if job.kept == 1:
        assert generated == trained
    assert trained + steps[-1].batch.leftover <= generated
    assert all(step.batch.groups == job.prompts for step in steps), "rounds are enough here"


@pytest.mark.parametrize("job", MODES)
def test_weights_are_at_most_max_staleness_old(job: Job) -> None:
    assert all(0 <= step.age <= job.max_staleness for step in simulate(job, 10).steps)
    slow_training = replace(job, speeds=replace(job.speeds, update=1000.0))
    assert simulate(slow_training, 10).max_age == job.max_staleness, "rollouts run ahead as far as they may"


@pytest.mark.parametrize("job", MODES)
def test_a_step_is_no_faster_than_its_bottleneck(job: Job) -> None:
    run = simulate(job, 20)
    collect = sum(step.batch.seconds for step in run.steps)
    train = sum(step.train + job.speeds.sync for step in run.steps)
    assert run.steps[-1].end >= max(collect, train) - 1e-6
    assert run.steps[-1].end <= collect + train + 1e-6, "and no slower than one part after the other"
    assert 0 <= run.trainer_idle <= 1
    assert 0 <= run.rollout_idle <= 1


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    for step in simulate(JOB, 4).steps:
        assert step.seconds == pytest.approx(0.5 + step.batch.seconds + step.train)


def test_one_step_ahead_takes_as_long_as_the_slower_side() -> None:
    slow_training = replace(JOB, max_staleness=1, speeds=replace(JOB.speeds, update=100.0))
    run = simulate(slow_training, 6)
    assert [step.seconds for step in run.steps[1:]] == pytest.approx([0.5 + step.train for step in run.steps[1:]])
    slow_rollouts = replace(JOB, max_staleness=1, speeds=replace(JOB.speeds, round=100.0))
    steps = simulate(slow_rollouts, 6).steps
    for before, step in itertools.pairwise(steps[1:-1]):
        # a step begins when the last one is trained; its rollouts began before that update
        assert step.seconds == pytest.approx(0.5 + step.train + step.batch.seconds - before.train, rel=0.01)


def test_a_server_drains_as_counted_by_hand() -> None:
    # three sequences of 1, 2 and 4 tokens: one token of three, one of two, two of one
    seconds, busy = generate(np.array([[4, 1, 2]]), 1, 3, [0.0, 1.0, 10.0, 100.0])
    assert (seconds, busy) == (112.0, 112.0)
    # two slots: 4 and 1 run, 2 waits for 1 and then runs beside the longest
    assert generate(np.array([[4, 1, 2]]), 1, 2, [0.0, 1.0, 10.0]) == (31.0, 31.0)


def test_without_failures_only_checkpoints_are_added() -> None:
    plain = simulate(JOB, 10)
    assert (plain.failures, plain.lost) == (0, 0)
    assert plain.seconds == pytest.approx(sum(step.seconds for step in plain.steps))
    saving = simulate(replace(JOB, faults=Faults(every=2, save=3.0)), 10)
    assert saving.seconds == pytest.approx(plain.seconds + 5 * 3.0)


def test_lengths_have_their_mean_and_limit() -> None:
    for mean, spread in ((100.0, 0.5), (900.0, 0.6)):
        lengths = LogNormal.with_mean(mean, spread, 1024)
        drawn = lengths.draw(np.random.default_rng(1), 20_000)
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
        assert 1 <= drawn.min() <= drawn.max() <= 1024


def test_lost_work_is_half_an_interval_and_a_restart_for_each_failure() -> None:
    job = replace(JOB, shared=True, faults=Faults(per_hour=10.0, every=5, restart=20.0))
    run = simulate(job, 5, run_steps=4_000)
    interval = sum(step.seconds for step in run.steps)
    assert run.failures == pytest.approx(10.0 * job.devices * run.seconds / 3600)
    assert run.lost == pytest.approx(run.failures * (interval / 2 + 20.0))
    with pytest.raises(ConfigError, match="--failures"):
        simulate(replace(job, faults=Faults(per_hour=1e5)), 20)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    assert simulate(JOB, 10, seed=1) == simulate(JOB, 10, seed=1)
    assert simulate(JOB, 10, seed=1).seconds != simulate(JOB, 10, seed=2).seconds


def test_more_servers_and_faster_training_never_slow_a_run_down() -> None:
    for age in (0, 1):
        by_servers = [simulate(replace(JOB, max_staleness=age, servers=n), 5).step_seconds for n in (1, 2, 4, 8, 16)]
        assert by_servers == sorted(by_servers, reverse=True)
        updates = [replace(JOB.speeds, update=seconds) for seconds in (0.1, 1.0, 10.0)]
        by_update = [simulate(replace(JOB, max_staleness=age, speeds=speeds), 5).step_seconds for speeds in updates]
        assert by_update == sorted(by_update)


def test_slots_that_nothing_waits_for_change_nothing() -> None:
    lengths = LENGTHS.draw(np.random.default_rng(0), 64).reshape(8, 8)
    assert generate(lengths, 2, 32, DECODE) == generate(lengths, 2, 256, DECODE)
    assert generate(lengths, 2, 8, DECODE)[0] > generate(lengths, 2, 32, DECODE)[0]
