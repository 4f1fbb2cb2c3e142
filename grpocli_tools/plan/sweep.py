"""Simulations of a plan with different numbers of servers: speeds from the plan or from a finished run, and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpocli.config.build import TARGET
from grpocli.config.yaml_text import flat_values
from grpocli.errors import ConfigError
from grpocli_tools.plan.efficiency import COSTS
from grpocli_tools.plan.memory import devices
from grpocli_tools.plan.simulate import Faults, Job, Lengths, LogNormal, Observed, Simulated, Speeds, simulate
from grpocli_tools.plan.work import decoding, host_seconds, running, step_demand, sync_seconds, training_step

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.plan.memory import PlanInputs
    from grpocli_tools.plan.plan import Plan

NODES = (*range(1, 9), 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of servers or rollout nodes that a sweep tries."""
FULL = 1 + 1e-9
SHARE, SPREAD, MAX_SPREAD = 0.5, 0.6, 100.0
"""Assumed mean length as a share of the longest; standard deviation as a share of the mean, assumed and the largest."""
MAX_STEPS, MAX_OPTION = 10_000, 1e9
SPEED_KEYS = (
    *("model", "engine._target_", "hardware.device", "hardware.parallel"),
    *("train.gradient_checkpointing", "train.packed"),
)
"""Keys, or sections, on which the speed of a device depends."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options of a simulation.

    lengths: "MEAN", "MEAN,SPREAD" or a run's folder. speeds: folders of runs. kept: share of groups kept. steps: to
    simulate; failures are those of train.steps like them. faults: failures and checkpoints; `every` is the config's.
    config: of the plan, with which the configs of `speeds` are compared.
    """

    lengths: str | None = None
    speeds: tuple[str, ...] = ()
    kept: float = 1.0
    steps: int = 20
    faults: Faults = field(default_factory=Faults)
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ConfigError(f"--kept {self.kept:g}: must be above 0 and at most 1")
        if not 1 <= self.steps <= MAX_STEPS:
            raise ConfigError(f"--steps {self.steps}: must be from 1 to {MAX_STEPS:,}")
        for name in ("per_hour", "save", "restart"):
            value = getattr(self.faults, name)
            if not 0 <= value <= MAX_OPTION:
                flag = {"per_hour": "failures"}.get(name, name)
                raise ConfigError(f"--{flag} {value:g}: must be a number from 0 to {MAX_OPTION:g}")


@dataclass(frozen=True, slots=True)
class Row:
    """A simulated run with `nodes` rollout nodes or, on one machine, servers. memory: share that is needed."""

    nodes: int
    simulated: Simulated
    memory: float

    @property
    def per_device(self) -> float:
        """Trained tokens per second and device over the whole run, with its checkpoints and failures."""
        return self.simulated.tokens_per_second * (1 - self.simulated.overhead) / self.simulated.job.devices


@dataclass(frozen=True, slots=True)
class Sweep:
    """The simulated runs. unit: "rollout nodes" or "servers". lengths, speeds: what was assumed, as sentences."""

    unit: str
    rows: tuple[Row, ...]
    planned: int
    lengths: str
    speeds: str

    @property
    def best(self) -> Row:
        """The row with the most trained tokens per second and device, of those that fit if any does."""
        return max(self.rows, key=lambda row: (row.memory <= FULL, row.per_device))

    @property
    def row(self) -> Row:
        """The row of the config."""
        return next(row for row in self.rows if row.nodes == self.planned)


def sweep(plan: Plan, options: Options) -> Sweep:
    """Simulate the plan's run with its own number of servers and with others. Raises ConfigError."""
    lengths, said = lengths_of(plan.run, options)
    unit, planned = _unit(plan)
    rows = []
    for nodes, inputs in _variants(plan, planned):
        job = job_of(plan, inputs, lengths, options)
        rows.append(Row(nodes, simulate(job, options.steps, plan.run.seed, plan.run.train.steps), _memory(inputs)))
    own = next(row for row in rows if row.nodes == planned).simulated.job
    return Sweep(unit, tuple(rows), planned, said, _speeds_text(own, options))


def _unit(plan: Plan) -> tuple[str, int]:
    resources = plan.resources
    if resources.rollout_nodes:
        return "rollout nodes", resources.rollout_nodes
    return "servers", _servers(plan.inputs)


def _variants(plan: Plan, planned: int) -> Iterator[tuple[int, PlanInputs]]:
    """Numbers of nodes or servers with the inputs of the plan that has them."""
    inputs, resources = plan.inputs, plan.resources
    if not resources.servers or resources.shared:
        yield planned, inputs
        return
    total = resources.trainers + resources.servers * resources.tensor_parallel
    each = resources.servers // planned
    apart, sharing = not resources.rollout_nodes, plan.run.hardware.context_parallel
    most = (total - 1) // resources.tensor_parallel if apart else max(2 * resources.train_nodes, planned)
    for nodes in sorted({planned, *(n for n in NODES if n <= most)}):
        trainers = total - nodes * resources.tensor_parallel if apart else resources.trainers
        if trainers % sharing and nodes != planned:
            continue
        changed = replace(resources, servers=nodes * each, trainers=trainers, rollout_nodes=0 if apart else nodes)
        yield nodes, replace(inputs, resources=changed)


def _memory(inputs: PlanInputs) -> float:
    """The share of its memory that a training device needs, or the one that needs most if anything does not fit.

    vLLM always fills its share.
    """
    shares = [device.peak / device.memory for device in devices(inputs)]
    return shares[0] if max(shares) <= FULL else max(shares)


def job_of(plan: Plan, inputs: PlanInputs, lengths: Lengths, options: Options) -> Job:
    """The job of a plan, with planned speeds or those of runs, whose seconds per completion token include prompts."""
    run, resources, rollout = plan.run, inputs.resources, plan.run.rollout
    slots = running(inputs, plan.devices, rollout.max_prompt_tokens + lengths.mean)
    keep = run.algorithm.keep
    if options.speeds:
        speeds, prompt = speeds_of_runs(map(Path, options.speeds), slots, resources.trainers), 0.0
    else:
        speeds = planned_speeds(inputs, lengths.mean, slots)
        prompt = rollout.max_prompt_tokens * (1.0 if inputs.packed else rollout.group_size)
    return Job(
        prompts=rollout.prompts_per_step,
        group=rollout.group_size,
        prompt_tokens=prompt,
        lengths=lengths,
        speeds=speeds,
        servers=_servers(inputs),
        slots=slots,
        trainers=resources.trainers,
        rollout_devices=resources.servers * resources.tensor_parallel,
        shared=resources.shared or not resources.servers,
        max_staleness=rollout.max_staleness,
        in_flight=rollout.in_flight,
        kept=options.kept,
        rounds=keep.max_rounds,
        carry=getattr(keep, "surplus", "discard") == "carry",
        faults=replace(options.faults, every=run.checkpoint.every),
    )


def _servers(inputs: PlanInputs) -> int:
    """Copies of the model that generate: the run's servers, those at engine.base_url, or the trainers' own."""
    external = len(getattr(inputs.engine, "urls", ()))
    return inputs.resources.servers or external or max(1, inputs.resources.trainers)


def planned_speeds(inputs: PlanInputs, completion: float, slots: int) -> Speeds:
    """The speeds that the formulas give for completions of a mean length."""
    rollout, costs = inputs.run.rollout, COSTS[inputs.resources.kind]
    prompt = rollout.max_prompt_tokens
    decoder = decoding(inputs, prompt + completion / 2)
    demand = step_demand(inputs, prompt, completion)
    fixed = demand.part("network", "layers").seconds(costs)
    seconds = max(demand.seconds(costs), host_seconds(inputs, prompt, completion))
    copies = _servers(inputs)
    return Speeds(
        decode=decoder.table(slots),
        round=decoder.prefill(rollout.prompts_per_step / copies * prompt),
        update=fixed,
        update_token=(seconds - fixed) / training_step(inputs, prompt, completion).tokens,
        sync=sync_seconds(inputs),
    )


def check_options(run: Run, options: Options) -> None:
    """Raise ConfigError for options that do not suit the planned run, or whose files do not serve."""
    if options.kept < 1 and run.algorithm.keep.max_rounds == 1:
        raise ConfigError(f"--kept {options.kept:g}: this run keeps every group; algorithm/keep=dynamic drops some")
    lengths_of(run, options)
    if options.speeds:
        speeds_of_runs(map(Path, options.speeds), slots=1, trainers=1)


def lengths_of(run: Run, options: Options) -> tuple[Lengths, str]:
    """The lengths of completions and a sentence about them. Raises ConfigError."""
    longest = run.rollout.max_completion_tokens
    text = options.lengths
    if text is None:
        mean, spread, said = SHARE * longest, SPREAD, " (assumed; --lengths)"
    else:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers and Path(text).is_dir():
            values = tuple(min(n, longest) for n in completion_lengths(Path(text)))
            return Observed(values), f"{len(values):,} completions of {text}, mean {np.mean(values):,.0f} tokens"
        mean, spread, said = [*numbers, math.nan][0], [*numbers, SPREAD, SPREAD][1], ""
        if len(numbers) > 2 or not 0 < mean < longest or not 0 <= spread <= MAX_SPREAD:
            raise ConfigError(
                f"--lengths {text}: give MEAN or MEAN,SPREAD, a mean below rollout.max_completion_tokens={longest} and "
                f"a standard deviation as a share of it, at most {MAX_SPREAD:g}, or a run's folder"
            )
    found = LogNormal.with_mean(mean, spread, longest)
    return found, f"log-normal, mean {mean:,.0f} tokens, deviation {spread:.0%} of it, cut at {longest:,}{said}"


def completion_lengths(run: Path, step: int | None = None) -> list[int]:
    """The tokens of all completions in the rollout files of a run or a step. Raises ConfigError if there are none."""
    from grpocli.runs.saved_run import SavedRun

    saved = SavedRun(run)
    steps = [one for one in saved.rollout_files if step in (None, one)]
    rows = [row for one in steps for row in saved.rollouts(one, lambda column: column == "length")]
    found = [row["length"] for row in rows if isinstance(row.get("length"), int)]
    if not found or len(found) < len(rows):
        raise ConfigError(f"{run}: has no completions in rollouts/; give the folder of a run that has them")
    return found


def speeds_of_runs(runs: Iterable[Path], slots: int, trainers: int) -> Speeds:
    """The speeds of synchronous runs, from their metrics and rollout files, without the first steps.

    A server that all completions run on at once needs, for a step, `a` for each token of the longest completion and
    `b` for each token: `a + b n` for a token of each of n sequences. Both come from least squares over the steps; runs
    with other numbers of completions tell them apart. slots: sequences of a server in the simulated run. trainers: of
    it; they share the update evenly.
    """
    steps = [step for run in runs for step in _measured_steps(run)]
    columns = np.array([[max(step.lengths), sum(step.lengths) / step.servers] for step in steps], dtype=float)
    first, each = nonnegative_fit(columns, np.array([step.seconds("rollout") for step in steps]))
    update = statistics.median(step.seconds("train") * step.processes / sum(step.lengths) for step in steps)
    return Speeds(
        decode=[0.0, *(float(first + each * n) for n in range(1, slots + 1))],
        reward=statistics.median(step.seconds("reward") for step in steps),
        update=max(0.0, statistics.median(step.seconds("step") - sum(map(step.seconds, PARTS)) for step in steps)),
        update_token=update / trainers,
        sync=statistics.median(step.seconds("sync") for step in steps),
    )


PARTS = ("rollout", "reward", "train", "sync")
"""Of a measured step; the rest of it, such as files and metrics, takes the same time however many tokens."""


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    run: Path
    row: dict[str, Any]
    lengths: list[int]
    servers: int
    processes: int

    def seconds(self, part: str) -> float:
        """Of a part of the step, or of all of it."""
        return float(self.row.get(f"time/{part}", 0.0))


def _measured_steps(run: Path) -> list[_MeasuredStep]:
    from grpocli.runs.saved_run import SavedRun

    saved = SavedRun(run).check()
    rows = [row for row in saved.metrics if row["step"] > 1]
    if len(rows) < 3 or any(row.get("sampling/rounds", 1) != 1 or row.get("staleness/max", 0) for row in rows):
        raise ConfigError(f"{run}: speeds need at least four steps with max_staleness=0 and one round of sampling each")
    config = saved.config
    processes = int(config["hardware"].get("processes") or 1)
    servers = _servers_of(config["engine"], processes)
    return [_MeasuredStep(run, row, completion_lengths(run, row["step"]), servers, processes) for row in rows]


def _other_keys(run: Path, planned: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` of a run for each of SPEED_KEYS in which it differs from the plan."""
    from grpocli.runs.saved_run import SavedRun

    theirs, own = (_flat(config) for config in (SavedRun(run).check().config, planned))
    names = [k for k in {**own, **theirs} if any(k == key or k.startswith(f"{key}.") for key in SPEED_KEYS)]
    other = [name for name in names if theirs.get(name) != own.get(name)]
    if "model._target_" in other:  # each kind of model has other keys
        other = [name for name in other if name == "model._target_" or not name.startswith("model.")]
    return [f"{name.removesuffix('._target_')}={theirs.get(name)}" for name in other]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values by key; a choice such as `engine/vllm` as the value of `engine._target_`."""
    values = flat_values(config).items()
    return {key: str(value).rpartition("/")[2] if key.endswith(f".{TARGET}") else value for key, value in values}


def _servers_of(engine: dict[str, Any], processes: int) -> int:
    """The servers of a saved config; trainer processes if they sample themselves."""
    urls = engine.get("base_url")
    if urls is not None:
        return 1 if isinstance(urls, str) else len(urls)
    return int(engine.get("replicas", processes))


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


def _speeds_text(job: Job, options: Options) -> str:
    speeds, most = job.speeds, min(job.slots, math.ceil(job.prompts / job.servers) * job.group)
    most = min(most, len(speeds.decode) - 1)
    source = f"of {', '.join(options.speeds)}" if options.speeds else "planned, not measured (--speeds RUN)"
    others = {run: _other_keys(Path(run), options.config) for run in options.speeds}
    differs = "".join(
        f"; {run} had {', '.join(keys)}, so they may not be this plan's" for run, keys in others.items() if keys
    )
    return (
        f"{source}: {1 / speeds.decode[1]:,.0f} tokens/s for one sequence of a server, "
        f"{most / speeds.decode[most]:,.0f} for {most:,}; update {speeds.update:.3g} s and "
        f"{1 / speeds.update_token:,.0f} tokens/s; sync {speeds.sync:.3g} s{differs}"
    )


def as_dict(found: Sweep) -> dict[str, Any]:
    """Every simulated run's figures."""
    return {
        "unit": found.unit,
        "best": found.best.nodes,
        "planned": found.planned,
        "lengths": found.lengths,
        "speeds": found.speeds,
        "rows": [_figures(row) for row in found.rows],
    }


def _figures(row: Row) -> dict[str, Any]:
    one = row.simulated
    return {
        "nodes": row.nodes,
        "servers": one.job.servers,
        "trainers": one.job.trainers,
        "devices": one.job.devices,
        "memory": row.memory,
        "step_seconds": one.step_seconds,
        "trainer_idle": one.trainer_idle,
        "rollout_idle": one.rollout_idle,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_and_device": row.per_device,
        "max_age": one.max_age,
        "run_seconds": one.seconds,
        "lost_seconds": one.lost,
        "failures": one.failures,
        "events": one.events,
        "faults": asdict(one.job.faults),
    }
