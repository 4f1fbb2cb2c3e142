"""Simulations of a plan with different numbers of servers: speeds from the plan or from a finished run, and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpocli.errors import ConfigError
from grpocli.runs.saved_run import SavedRun
from grpocli_tools.plan.simulate import Faults, Job, LogNormal, Observed, Simulated, Speeds, simulate
from grpocli_tools.plan.times import COSTS, Decoding, TrainingStep, running_sequences, sync_seconds

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.plan.plan import Plan

NODES = (*range(1, 9), 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of servers or rollout nodes that a sweep tries."""
FULL = 1 + 1e-9
SHARE, SPREAD, MAX_SPREAD = 0.5, 0.6, 100.0
"""Assumed mean length as a share of the longest; standard deviation as a share of the mean, assumed and the largest."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options of a simulation."""

    lengths: str | None = None
    """`MEAN`, `MEAN,SPREAD` or a run's folder."""
    speeds: tuple[str, ...] = ()
    """Folders of runs."""
    kept: float = 1.0
    """The share of groups that are kept."""
    steps: int = 20
    """Steps to simulate; failures are those of train.steps like them."""
    faults: Faults = field(default_factory=Faults)
    """Failures and checkpoints; `every` is the config's."""


@dataclass(frozen=True, slots=True)
class Row:
    """A simulated run."""

    nodes: int
    """Rollout nodes or, on one machine, servers."""
    simulated: Simulated
    memory: float
    """The share of its memory that a training device needs, or the device that needs most if one does not fit."""

    @property
    def per_device(self) -> float:
        """Trained tokens per second and device over the whole run, with its checkpoints and failures."""
        return self.simulated.tokens_per_second * (1 - self.simulated.overhead) / self.simulated.job.devices


@dataclass(frozen=True, slots=True)
class Sweep:
    """The simulated runs."""

    unit: str
    """`rollout nodes` or `servers`."""
    rows: tuple[Row, ...]
    planned: int
    """The number of the config."""
    lengths: str
    """What was assumed, as a sentence; `speeds` too."""
    speeds: str

    @property
    def best(self) -> Row:
        """The row with the most trained tokens per second and device, of those that fit if any does."""
        return max(self.rows, key=lambda row: (row.memory <= FULL, row.per_device))

    @property
    def row(self) -> Row:
        return next(row for row in self.rows if row.nodes == self.planned)

    def as_dict(self) -> dict[str, Any]:
        ours = ("unit", "planned", "lengths", "speeds")
        of_job, of_run = ("servers", "trainers", "devices"), ("step_seconds", "trainer_idle", "rollout_idle")
        rows = [
            {
                "nodes": row.nodes,
                **{name: getattr(row.simulated.job, name) for name in of_job},
                "memory": row.memory,
                **{name: getattr(row.simulated, name) for name in (*of_run, "tokens_per_second", "max_age")},
                "tokens_per_second_and_device": row.per_device,
                "run_seconds": row.simulated.seconds,
                "lost_seconds": row.simulated.lost,
                "failures": row.simulated.failures,
                "faults": asdict(row.simulated.job.faults),
            }
            for row in self.rows
        ]
        return {"best": self.best.nodes, **{name: getattr(self, name) for name in ours}, "rows": rows}


def sweep(plan: Plan, options: Options) -> Sweep:
    """Simulate the plan's run with its own number of servers and with others. Raises ConfigError."""
    if options.kept < 1 and plan.run.algorithm.keep.max_rounds == 1:
        problem = "this run keeps every group; algorithm/keep=dynamic drops some"
        raise ConfigError(problem, key="--kept", value=options.kept)
    lengths, said = lengths_of(plan.run, options.lengths)
    nodes = plan.resources.rollout_nodes
    unit, planned = ("rollout nodes", nodes) if nodes else ("servers", _servers(plan))
    rows = []
    for number, variant in _variants(plan, planned):
        simulated = simulate(_job(variant, lengths, options), options.steps, plan.run.seed, plan.run.train.steps)
        shares = [device.peak / device.memory for device in variant.devices]  # vLLM always fills its share
        rows.append(Row(number, simulated, shares[0] if max(shares) <= FULL else max(shares)))
    found = Sweep(unit, tuple(rows), planned, said, "")
    return replace(found, speeds=_speeds_text(found.row.simulated.job, options.speeds))


def _variants(plan: Plan, planned: int) -> Iterator[tuple[int, Plan]]:
    """Numbers of nodes or servers with the plan that has them."""
    resources = plan.resources
    if not resources.servers or resources.shared:
        yield planned, plan
        return
    apart, tensor_parallel = not resources.rollout_nodes, resources.tensor_parallel
    total = resources.trainers + resources.servers * tensor_parallel
    most = (total - 1) // tensor_parallel if apart else max(2 * resources.train_nodes, planned)
    for nodes in sorted({planned, *(n for n in NODES if n <= most)}):
        trainers = total - nodes * tensor_parallel if apart else resources.trainers
        if nodes == planned or trainers % plan.run.hardware.context_parallel == 0:
            servers, machines = nodes * (resources.servers // planned), 0 if apart else nodes
            changed = replace(resources, servers=servers, trainers=trainers, rollout_nodes=machines)
            yield nodes, replace(plan, resources=changed)


def _job(plan: Plan, lengths: LogNormal | Observed, options: Options) -> Job:
    """The job of a plan, with planned speeds or those of runs, whose seconds per completion token include prompts."""
    run, resources, rollout = plan.run, plan.resources, plan.run.rollout
    slots = running_sequences(plan, rollout.max_prompt_tokens + lengths.mean)
    if options.speeds:
        speeds, prompt = speeds_of_runs(options.speeds, slots, resources.trainers), 0.0
    else:
        speeds = planned_speeds(plan, lengths.mean, slots)
        prompt = rollout.max_prompt_tokens * (1.0 if plan.rows.packed else rollout.group_size)
    return Job(
        prompts=rollout.prompts_per_step,
        group=rollout.group_size,
        prompt_tokens=prompt,
        lengths=lengths,
        speeds=speeds,
        servers=_servers(plan),
        slots=slots,
        trainers=resources.trainers,
        rollout_devices=resources.servers * resources.tensor_parallel,
        shared=resources.shared or not resources.servers,
        max_staleness=rollout.max_staleness,
        in_flight=rollout.in_flight,
        in_order=rollout.in_order,
        kept=options.kept,
        rounds=run.algorithm.keep.max_rounds,
        carry=run.algorithm.keep.surplus == "carry",
        faults=replace(options.faults, every=run.checkpoint.every),
    )


def _servers(plan: Plan) -> int:
    """Copies of the model that generate: the run's servers, those at engine.base_url, or the trainers' own."""
    return plan.resources.servers or len(getattr(plan.engine, "urls", ())) or max(1, plan.resources.trainers)


def planned_speeds(plan: Plan, completion: float, slots: int) -> Speeds:
    """The speeds that the formulas give for completions of a mean length."""
    rollout = plan.run.rollout
    prompt = rollout.max_prompt_tokens
    decoding, step = Decoding.of(plan, prompt + completion / 2), TrainingStep.of(plan, prompt, completion)
    fixed = step.demand().part("network", "layers").seconds(COSTS[plan.resources.kind])
    return Speeds(
        decode=decoding.table(slots),
        round=decoding.prefill(rollout.prompts_per_step / _servers(plan) * prompt),
        update=fixed,
        update_token=(step.seconds() - fixed) / (step.prompts * prompt + step.rows * completion),
        sync=sync_seconds(plan),
    )


def lengths_of(run: Run, text: str | None) -> tuple[LogNormal | Observed, str]:
    """The lengths of completions that --lengths names, and a sentence about them. Raises ConfigError."""
    longest = run.rollout.max_completion_tokens
    if text and Path(text).is_dir():
        seen = Observed(np.minimum(completion_lengths(SavedRun(Path(text))), longest))
        return seen, f"{len(seen.values):,} completions of {text}, mean {seen.mean:,.0f} tokens"
    mean, spread, assumed = SHARE * longest, SPREAD, " (assumed; --lengths)"
    if text is not None:
        assumed, (first, comma, second) = "", text.partition(",")
        try:
            mean, spread = float(first), float(second) if comma else SPREAD
        except ValueError:
            mean = math.nan
        if not 0 < mean < longest or not 0 <= spread <= MAX_SPREAD:
            raise ConfigError(
                f"give MEAN or MEAN,SPREAD, a mean below rollout.max_completion_tokens={longest} and a standard "
                f"deviation as a share of it, at most {MAX_SPREAD:g}, or a run's folder",
                key="--lengths",
                value=text,
            )
    said = f"log-normal, mean {mean:,.0f} tokens, deviation {spread:.0%} of it, cut at {longest:,}{assumed}"
    return LogNormal.with_mean(mean, spread, longest), said


def completion_lengths(saved: SavedRun, step: int | None = None) -> list[int]:
    """The tokens of all completions in the rollout files of a run or a step. Raises ConfigError if there are none."""
    steps = [one for one in saved.rollout_files if step in (None, one)]
    found = [row["length"] for one in steps for row in saved.rollouts(one, lambda column: column == "length")]
    if not found:
        raise ConfigError(f"{saved.path}: has no completions in rollouts/; give the folder of a run that has them")
    return found


def speeds_of_runs(runs: tuple[str, ...], slots: int, trainers: int) -> Speeds:
    """The speeds of synchronous runs, from their metrics and rollout files, without the first steps.

    A server that all completions run on at once needs, for a step, `a` for each token of the longest completion and
    `b` for each token: `a + b n` for a token of each of n sequences. Both come from least squares over the steps; runs
    with other numbers of completions tell them apart. slots: sequences of a server in the simulated run. trainers: of
    it; they share the update evenly.
    """
    steps = [step for run in runs for step in _measured_steps(Path(run))]
    columns = np.array([[max(step.lengths), sum(step.lengths) / step.servers] for step in steps], dtype=float)
    first, each = nonnegative_fit(columns, np.array([step.seconds("rollout") for step in steps]))
    update = statistics.median(step.seconds("train") * step.processes / sum(step.lengths) for step in steps)
    # the rest of a step, such as files and metrics, takes the same time however many tokens
    rest = [step.seconds("step") - sum(map(step.seconds, ("rollout", "reward", "train", "sync"))) for step in steps]
    return Speeds(
        decode=[0.0, *(float(first + each * n) for n in range(1, slots + 1))],
        reward=statistics.median(step.seconds("reward") for step in steps),
        update=max(0.0, statistics.median(rest)),
        update_token=update / trainers,
        sync=statistics.median(step.seconds("sync") for step in steps),
    )


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    row: Mapping[str, Any]
    """Of metrics.jsonl."""
    lengths: list[int]
    servers: int
    processes: int

    def seconds(self, part: str) -> float:
        """Of a part of the step, or of all of it."""
        return float(self.row.get(f"time/{part}", 0.0))


def _measured_steps(run: Path) -> list[_MeasuredStep]:
    saved = SavedRun(run).check()
    rows = [row for row in saved.metrics if row["step"] > 1]
    if len(rows) < 3 or any(row.get("sampling/rounds", 1) != 1 or row.get("staleness/max", 0) for row in rows):
        raise ConfigError(f"{run}: speeds need at least four steps with max_staleness=0 and one round of sampling each")
    engine, processes = saved.section("engine"), int(saved.flat.get("hardware.processes") or 1)
    urls = engine.get("base_url")
    servers = len([urls] if isinstance(urls, str) else urls) if urls else engine.get("replicas", processes)
    return [_MeasuredStep(row, completion_lengths(saved, row["step"]), servers, processes) for row in rows]


def nonnegative_fit(columns: Any, values: Any) -> Any:
    """The coefficients of 0 or more with the least squares: the best over all subsets of columns."""
    count, best, least = columns.shape[1], np.zeros(columns.shape[1]), math.inf
    for subset in range(1, 2**count):
        chosen = [i for i in range(count) if subset >> i & 1]
        found, *_ = np.linalg.lstsq(columns[:, chosen], values, rcond=None)
        error = float(np.sum((columns[:, chosen] @ found - values) ** 2))
        if (found >= 0).all() and error < least:
            least, best = error, np.zeros(count)
            best[chosen] = found
    return best


def _speeds_text(job: Job, runs: tuple[str, ...]) -> str:
    speeds, most = job.speeds, min(job.slots, math.ceil(job.prompts / job.servers) * job.group)
    source = f"of {', '.join(runs)}" if runs else "planned, not measured (--speeds RUN)"
    return (
        f"{source}: {1 / speeds.decode[1]:,.0f} tokens/s for one sequence of a server, "
        f"{most / speeds.decode[most]:,.0f} for {most:,}; update {speeds.update:.3g} s and "
        f"{1 / speeds.update_token:,.0f} tokens/s; sync {speeds.sync:.3g} s"
    )
