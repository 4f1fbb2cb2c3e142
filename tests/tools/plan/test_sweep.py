"""`grpocli plan --simulate`: speeds of plans and of runs, numbers of servers, and errors."""

from __future__ import annotations

import functools
import json
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
from grpocli_tools.plan.simulate import Faults, generate
from grpocli_tools.plan.sweep import Options, nonnegative_fit, speeds_of_runs, sweep

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
        seconds, _ = generate(np.array([own]), 1, len(own), [0.0, *(first + each * n for n in range(1, len(own) + 1))])
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
def test_servers_and_trainers_share_the_machine() -> None:
    found = sweep(planned("engine.replicas=2"), Options(steps=3))
    assert [row.nodes for row in found.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert {row.simulated.job.devices for row in found.rows} == {8}
    assert found.row.nodes == 2
    generation = [row.simulated.steps[-1].batch.seconds for row in found.rows]
    assert generation == sorted(generation, reverse=True)
    training = [row.simulated.steps[-1].train for row in found.rows]
    assert training == sorted(training)
    assert found.best.per_device == max(row.per_device for row in found.rows if row.memory <= 1 + 1e-9)


@pytest.mark.slow
def test_the_best_number_of_servers_counts_what_failures_take() -> None:
    found = sweep(planned("engine.replicas=2"), Options(steps=3))
    failing = replace(found.best, simulated=replace(found.best.simulated, overhead=0.9))
    rows = tuple(failing if row is found.best else row for row in found.rows)
    assert failing.per_device == pytest.approx(found.best.per_device / 10)
    assert replace(found, rows=rows).best.nodes != found.best.nodes


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
def test_trainers_that_share_micro_batches_stay_together() -> None:
    found = sweep(planned("engine.replicas=2", "hardware.context_parallel=2"), Options(steps=1))
    assert [row.simulated.job.trainers for row in found.rows] == [6, 4, 2]


@pytest.mark.slow
def test_rollout_nodes_come_on_top_of_training_nodes() -> None:
    nodes = ("hardware=multinode", "hardware.train_nodes=2", "hardware.rollout_nodes=1", "engine.replicas=8")
    found = sweep(planned(*nodes), Options(steps=3, faults=Faults(save=1.0)))
    assert [(row.nodes, row.simulated.job.devices) for row in found.rows] == [(1, 24), (2, 32), (3, 40), (4, 48)]
    assert found.unit == "rollout nodes"
    assert all(row.simulated.overhead > 0 for row in found.rows)
