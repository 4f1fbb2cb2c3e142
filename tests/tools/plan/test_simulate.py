"""The simulation of a run: laws of every cluster, cases known from arithmetic; and `grpocli plan --simulate`."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli_tools.plan.plan import Plan, make_plan
from grpocli_tools.plan.resources import DeviceOptions
from grpocli_tools.plan.simulate import Faults, Job, LogNormal, Server, Speeds, simulate
from grpocli_tools.plan.sweep import Options, nonnegative_fit, speeds_of_runs, sweep

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
DYNAMIC = replace(JOB, kept=0.5, rounds=10)
ROUNDS = [JOB, DYNAMIC, replace(DYNAMIC, carry=True)]
STREAMS = [
    replace(job, max_staleness=age, in_flight=flight, in_order=not flight)
    for job, age, flight in itertools.product([JOB, DYNAMIC], (1, 2, 4), (False, True))
]


def drained(lengths: list[int], slots: int, decode: Sequence[float]) -> float:
    """Seconds until completions of these lengths are done on one server."""
    server = Server(slots, decode)
    server.add(0, np.array(lengths))
    while server.running:
        server.end_next()
    assert server.busy == server.now
    return server.now


@pytest.mark.parametrize("job", [*ROUNDS, *STREAMS])
def test_tokens_ages_and_bottlenecks_of_every_mode(job: Job) -> None:
    run = simulate(job, 20)
    whole = job.prompts * job.group * LENGTHS.mean
    assert np.mean([step.trained for step in run.steps]) == pytest.approx(whole, rel=0.05), "rounds are enough here"
    assert all(0 <= step.age <= job.max_staleness + job.carry for step in run.steps)
    slow_training = replace(job, speeds=replace(job.speeds, update=1000.0))
    oldest = 1 if job.in_flight and job.max_staleness else job.max_staleness + job.carry
    last = simulate(slow_training, 20).steps[-1]
    assert last.age == oldest, "in the end a stream runs ahead no further than the trainer needs"
    train = sum(step.train + job.speeds.sync for step in run.steps)
    busy = sum(step.busy for step in run.steps) / job.servers
    assert run.seconds >= max(train, busy) - 1e-6, "no faster than its bottleneck"
    assert 0 <= run.trainer_idle <= 1
    assert 0 <= run.rollout_idle <= 1


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    for step in simulate(replace(JOB, servers=1), 4).steps:
        assert step.seconds == pytest.approx(0.5 + 0.2 + step.busy + 0.1 + step.train)


@pytest.mark.parametrize("in_flight", [False, True])
def test_steps_that_sample_ahead_take_as_long_as_the_slower_side(in_flight: bool) -> None:
    slow_training = replace(
        JOB, max_staleness=1, in_flight=in_flight, in_order=not in_flight, speeds=replace(JOB.speeds, update=100.0)
    )
    run = simulate(slow_training, 6)
    assert [step.seconds for step in run.steps[1:]] == pytest.approx([0.5 + step.train for step in run.steps[1:]])


def test_a_stream_keeps_slow_servers_full() -> None:
    slow = replace(JOB, max_staleness=2, speeds=replace(JOB.speeds, decode=[10 * seconds for seconds in DECODE]))
    waits, stream = (simulate(replace(slow, in_flight=flight, in_order=not flight), 30) for flight in (False, True))
    assert stream.rollout_idle < 0.05 < waits.rollout_idle
    assert stream.tokens_per_second > 2 * waits.tokens_per_second


@pytest.mark.parametrize("job", [JOB, DYNAMIC])
def test_a_larger_staleness_hides_more_stragglers(job: Job) -> None:
    seconds = [
        simulate(replace(job, max_staleness=age, in_flight=True, in_order=False), 30).step_seconds
        for age in (0, 1, 2, 4)
    ]
    assert all(later < 0.9 * before for before, later in itertools.pairwise(seconds))


@pytest.mark.parametrize("job", [job for job in STREAMS if job.in_flight])
@pytest.mark.parametrize("update", [0.3, 5.0, 20.0])
def test_a_stream_is_never_slower_than_one_that_waits_before_each_sync(job: Job, update: float) -> None:
    job = replace(job, speeds=replace(job.speeds, update=update))
    stream, waits = simulate(job, 20), simulate(replace(job, in_flight=False, in_order=True), 20)
    assert stream.seconds <= waits.seconds + 1e-6


def test_a_server_drains_as_counted_by_hand() -> None:
    # three sequences of 1, 2 and 4 tokens: one token of three, one of two, two of one
    assert drained([4, 1, 2], 3, [0.0, 1.0, 10.0, 100.0]) == 112.0
    # two slots: 4 and 1 run, 2 waits for 1 and then runs beside the longest
    assert drained([4, 1, 2], 2, [0.0, 1.0, 10.0]) == 31.0


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
    for age, flight in ((0, False), (1, False), (1, True), (2, True)):
        job = replace(JOB, max_staleness=age, in_flight=flight, in_order=not flight)
        by_servers = [simulate(replace(job, servers=n), 30).step_seconds for n in (1, 2, 4, 8, 16)]
        assert by_servers == sorted(by_servers, reverse=True)
        updates = [replace(JOB.speeds, update=seconds) for seconds in (0.1, 1.0, 10.0)]
        by_update = [simulate(replace(job, speeds=speeds), 30).step_seconds for speeds in updates]
        assert by_update == pytest.approx(sorted(by_update), rel=1e-9)


def test_slots_that_nothing_waits_for_change_nothing() -> None:
    lengths = LENGTHS.draw(np.random.default_rng(0), 32).tolist()
    assert drained(lengths, 32, DECODE) == drained(lengths, 256, DECODE)
    assert drained(lengths, 8, DECODE) > drained(lengths, 32, DECODE)


ON_GPUS = ("model=qwen2.5-0.5b", "hardware.device=cuda", "hardware.parallel=fsdp2", "engine=vllm")


@functools.cache
def planned(*overrides: str) -> Plan:
    run = build_run(compose([*ON_GPUS, "rollout.max_completion_tokens=512", *overrides]))
    return make_plan(run, DeviceOptions(devices=8), trace_memory=False)


def write_run(folder: Path, lengths: list[list[int]], first: float, each: float, servers: int = 1) -> None:
    """A synchronous run whose servers follow the law of decoding exactly."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"engine: {{replicas: {servers}}}\nhardware: {{processes: 1}}\n")
    rows = []
    for step, own in enumerate(lengths, 1):
        pq.write_table(pa.table({"length": own}), folder / "rollouts" / f"step_{step:06d}.parquet")
        seconds = drained(own, len(own), [0.0, *(first + each * n for n in range(1, len(own) + 1))])
        times = {"time/rollout": seconds, "time/train": 1e-3 * sum(own), "time/reward": 0.25, "time/sync": 0.5}
        times["time/step"] = sum(times.values()) + 0.125
        rows.append(json.dumps({"step": step, **times}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")


def test_speeds_of_a_run_are_those_that_it_had(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, count in (("few", 8), ("many", 32)):
        write_run(tmp_path / name, random.integers(1, 200, (6, count)).tolist(), first=0.02, each=0.001)
    speeds = speeds_of_runs((f"{tmp_path}/few", f"{tmp_path}/many"), slots=64, trainers=2)
    assert speeds.decode[1] == pytest.approx(0.021, rel=0.01)
    assert speeds.decode[64] == pytest.approx(0.084, rel=0.01)
    assert speeds.update_token == pytest.approx(0.5e-3)
    assert (speeds.sync, speeds.reward) == (0.5, 0.25)
    assert speeds.update == pytest.approx(0.125)


def test_a_fit_has_no_negative_coefficients() -> None:
    columns = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]])
    assert nonnegative_fit(columns, columns @ [2.0, 0.5]) == pytest.approx([2.0, 0.5])
    assert nonnegative_fit(columns, columns @ [2.0, -0.5])[1] == 0


@pytest.mark.slow
def test_servers_and_trainers_share_the_machine_and_the_best_split_is_found() -> None:
    found = sweep(planned("engine.replicas=2"), Options(steps=3))
    assert [row.nodes for row in found.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert {row.simulated.job.devices for row in found.rows} == {8}
    assert found.row.nodes == 2
    generation = [row.simulated.steps[-1].seconds - row.simulated.steps[-1].train for row in found.rows]
    assert generation == sorted(generation, reverse=True)
    training = [row.simulated.steps[-1].train for row in found.rows]
    assert training == pytest.approx(sorted(training), rel=1e-3)
    assert found.best.per_device == max(row.per_device for row in found.rows if row.memory <= 1 + 1e-9)
    failing = replace(found.best, simulated=replace(found.best.simulated, overhead=0.9))
    rows = tuple(failing if row is found.best else row for row in found.rows)
    assert failing.per_device == pytest.approx(found.best.per_device / 10)
    assert replace(found, rows=rows).best.nodes != found.best.nodes, "the best counts what failures take"
    found = sweep(planned("engine.replicas=2", "hardware.context_parallel=2"), Options(steps=1))
    assert [row.simulated.job.trainers for row in found.rows] == [6, 4, 2], "those that share micro-batches"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (Options(lengths="9999"), "--lengths=9999"),
        (Options(lengths="5,1e300"), "--lengths=5,1e300"),
        (Options(lengths=","), "--lengths=,"),
        (Options(lengths="nowhere"), "--lengths=nowhere"),
        (Options(lengths="/usr"), "/usr: has no completions in rollouts/"),
        (Options(speeds=("nowhere",)), "RUN nowhere"),
        (Options(kept=0.5), "--kept=0.5"),
    ],
)
def test_bad_options_are_named(options: Options, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sweep(planned("engine.replicas=2"), options)


@pytest.mark.slow
def test_rollout_nodes_come_on_top_of_training_nodes() -> None:
    nodes = ("hardware=multinode", "hardware.train_nodes=2", "hardware.rollout_nodes=1", "engine.replicas=8")
    found = sweep(planned(*nodes), Options(steps=3, faults=Faults(save=1.0)))
    assert [(row.nodes, row.simulated.job.devices) for row in found.rows] == [(1, 24), (2, 32), (3, 40), (4, 48)]
    assert found.unit == "rollout nodes"
    assert all(row.simulated.overhead > 0 for row in found.rows)
