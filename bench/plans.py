"""Plans beside published figures of other frameworks: `python bench/plans.py [--fit] [--write]`.

`bench/published.json` has the figures, their configs and sources. Half of the rows fit the
costs in `grpocli/plan/efficiency.py`, the other half judges them. The rule: rows with the same name (the same work on
other GPUs) belong together; of the names in alphabetical order the first, third, ... fit, the second, fourth, ...
judge. Rows on an A6000 never fit.

Prints the tables as Markdown. --fit prints the costs that the fit gives. --write puts the tables into docs/plan.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpocli.launch.compose import build_run, compose
from grpocli.plan.efficiency import COSTS, DECODE_COSTS, DecodeCosts, Decoding, Demand, training_demand
from grpocli.plan.plan import Plan, make_plan
from grpocli.plan.resources import GIB, DeviceOptions
from grpocli.plan.simulate import Job, LogNormal, Speeds, simulate
from grpocli.plan.sweep import nonnegative_fit
from grpocli.plan.work import training_step

Row = dict[str, Any]

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
PROMPT, SPREAD = 128, 0.6  # not published: assumed
SLOTS, LINK = 1024, 25e9  # sequences of a server; bytes per second from trainers to servers
LIBRARIES = "libraries"  # not in the published memory, which counts torch's allocator
FITTED_ON = ("H100", "H200")
LEAST = Demand(linear=1.25, experts=1.25, attention=1.25, attention_3=1.25, traffic=1, network=1)
"""The least costs: no product reaches more than 80 % of the peak. Other parts may cost nothing."""


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that fit and those that judge, by the rule above."""
    names = sorted({row["name"] for row in rows if row.get("device", "H100") in FITTED_ON})
    fitting = set(names[::2])
    fit = [row for row in rows if row["name"] in fitting and row.get("device", "H100") in FITTED_ON]
    return fit, [row for row in rows if row not in fit]


def model_override(name: str, folder: Path) -> list[str]:
    """A model of ours, or one whose config is in the data file."""
    if name not in PUBLISHED["models"]:
        return [f"model={name}"]
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(PUBLISHED["models"][name]))
    return ["model=hf", f"model.path={path}"]


def training_overrides(row: Row) -> list[str]:
    """The config of a training benchmark: whole rows of one token of prompt, one for each micro-batch."""
    return [
        f"model.lora.rank={row['lora_rank']}",
        "model.head_dtype=null",
        "algorithm=drgrpo",
        "engine=transformers",
        "hardware.device=cuda",
        f"hardware.processes={row['gpus']}",
        "hardware.parallel=fsdp2",
        "rollout.max_prompt_tokens=1",
        f"rollout.max_completion_tokens={row['tokens'] - 1}",
        f"rollout.prompts_per_step={row['gpus'] * row['micro_batches'] // 2}",
        "rollout.group_size=2",
        f"train.micro_batch_tokens={row['tokens']}",
        "train.gradient_checkpointing=true",
        f"train.activation_offload={str(row['offload']).lower()}",
    ]


@functools.cache
def _plan(overrides: tuple[str, ...], gpu: str, gpus: int, traced: bool) -> Plan:
    return make_plan(build_run(compose(list(overrides))), DeviceOptions(devices=gpus, gpu=gpu), trace_memory=traced)


def training_plan(row: Row, folder: Path, traced: bool = False) -> Plan:
    overrides = (*model_override(row["model"], folder), *training_overrides(row))
    return _plan(overrides, row["device"], row["gpus"], traced)


def demand_of(row: Row, folder: Path) -> Demand:
    """The work of each GPU in a row's step."""
    plan = training_plan(row, folder)
    step = replace(training_step(plan.inputs), flash_3=row["attention"] == "flash_attention_3")
    return training_demand(plan.size, step, row["gpus"], plan.resources)


def fit_training(rows: Sequence[Row], folder: Path) -> Demand:
    """The costs with the least squares of relative errors, none below `LEAST`."""
    demands = np.array([demand_of(row, folder).values() for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    least, used = np.array(LEAST.values()), demands.any(axis=0)
    relative, missing = demands / seconds[:, None], 1 - demands @ least / seconds
    found = least.copy()
    found[used] += nonnegative_fit(relative[:, used], missing)
    return Demand(*map(float, found))


def planned_memory(row: Row, folder: Path) -> float:
    """Bytes of torch's allocator during the update, of one GPU."""
    items = training_plan(row, folder, traced=True).devices[0].items
    return sum(item.update for item in items if item.name != LIBRARIES)


def step_plan(row: Row, folder: Path) -> Plan:
    """The plan of a row of NeMo RL; servers and trainers are set by `step_job`."""
    overrides = (
        *model_override(row["model"], folder),
        "model.head_dtype=null",
        "algorithm=grpo",
        "engine=transformers",
        "hardware.device=cuda",
        f"hardware.processes={row['gpus']}",
        "hardware.parallel=fsdp2",
        f"rollout.max_prompt_tokens={PROMPT}",
        f"rollout.max_completion_tokens={row['longest'] - PROMPT}",
        f"rollout.prompts_per_step={row['prompts']}",
        f"rollout.group_size={row['group']}",
        f"train.micro_batch_tokens={row['longest']}",
        f"train.gradient_checkpointing={str(row['checkpointing']).lower()}",
    )
    return _plan(overrides, "H100", row["gpus"], False)


def step_job(row: Row, folder: Path, costs: DecodeCosts, training: Demand) -> Job:
    """The simulated run of a row of NeMo RL.

    Its trainer, Megatron, splits layers and experts over GPUs, so that no weights are gathered: like DDP's, its network
    carries the gradients once. Its asynchronous runs generate the prompts of several steps at a time, so those of
    `staleness + 1` steps are simulated as one.
    """
    plan, at_once = step_plan(row, folder), row["staleness"] + 1
    shared, tp = not row["rollout_gpus"], row["tensor_parallel"]
    trainers = row["gpus"] - row["rollout_gpus"]
    mean, longest = row["mean"] - PROMPT, row["longest"] - PROMPT
    resources = replace(plan.resources, trainers=trainers, tensor_parallel=tp, link=min(plan.resources.link, 400e9))
    inputs = replace(plan.inputs, resources=resources)
    step = replace(training_step(inputs, PROMPT, mean), prompts=row["prompts"] * row["group"], shards=1)
    demand = training_demand(plan.size, step, trainers, resources)
    seconds = demand.seconds(training)
    servers = (row["gpus"] if shared else row["rollout_gpus"]) // tp
    most = min(SLOTS, math.ceil(at_once * row["prompts"] / servers) * row["group"])
    decoder = Decoding(plan.size, resources, costs, tp, 2, 2, PROMPT + mean / 2)
    return Job(
        prompts=at_once * row["prompts"],
        group=row["group"],
        prompt_tokens=0.0,
        lengths=_lengths(mean, SPREAD, longest),
        speeds=Speeds(
            decode=decoder.table(most),
            round=decoder.prefill(at_once * row["prompts"] / servers * PROMPT),
            update=at_once * seconds,
            sync=at_once * 2 * plan.size.parameters / LINK,
        ),
        servers=servers,
        slots=most,
        trainers=trainers,
        rollout_devices=row["rollout_gpus"] or row["gpus"],
        shared=shared,
        max_staleness=min(1, row["staleness"]),
        in_flight=bool(row["staleness"]),
    )


@functools.cache
def _lengths(mean: float, spread: float, longest: int) -> LogNormal:
    return LogNormal.with_mean(mean, spread, longest)


def step_seconds(row: Row, folder: Path, costs: DecodeCosts, training: Demand) -> float:
    job = step_job(row, folder, costs, training)
    return float(simulate(job, 5).step_seconds / (row["staleness"] + 1))


def fit_decoding(rows: Sequence[Row], folder: Path, training: Demand) -> DecodeCosts:
    """The costs of a grid with the least squares of logarithms."""
    grid = itertools.product(
        (1.25, 1.5, 1.75, 2.0, 2.5),
        (2.0,),
        (0.0, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4),
        (0.0, 5e-5, 1e-4, 2e-4),
        (0.0, 2.5e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4),
    )

    def error(costs: DecodeCosts) -> float:
        return sum(math.log(step_seconds(row, folder, costs, training) / row["seconds"]) ** 2 for row in rows)

    return min((DecodeCosts(*values) for values in grid), key=error)


def overlap_job(row: Row, gpus: int, mean: float, update: float) -> Job:
    """A run of verl whose completions are generated on `gpus`."""
    overrides = ("model=qwen2.5-math-7b", "model.head_dtype=null", "engine=transformers", "hardware.device=cuda")
    plan = _plan(overrides, "H20", 1, False)
    servers = gpus // row["tensor_parallel"]
    slots = min(SLOTS, math.ceil(row["prompts"] / servers) * row["group"])
    decoder = Decoding(plan.size, plan.resources, DECODE_COSTS["cuda"], row["tensor_parallel"], 2, 2, mean / 2)
    return Job(
        prompts=row["prompts"],
        group=row["group"],
        prompt_tokens=0.0,
        lengths=LogNormal(mean, SPREAD, row["longest"]),
        speeds=Speeds(decode=decoder.table(slots), update=update, sync=2 * plan.size.parameters / LINK),
        servers=servers,
        slots=slots,
        trainers=row["trainers"],
        rollout_devices=gpus,
    )


def overlap_seconds(row: Row) -> float:
    """The simulated step of an asynchronous run, from the pieces of the colocated one.

    The mean length is not published: it is the one with which the colocated run generates for its published seconds.
    """
    one, low, high = row["colocated"], 16.0, 4.0 * row["longest"]
    for _ in range(20):
        mean = math.sqrt(low * high)
        seconds = simulate(overlap_job(row, one["gpus"], mean, 0.0), 2).steps[-1].batch.seconds
        low, high = (mean, high) if seconds < one["gen"] else (low, mean)
    update = one["update"] + (one["old_logp"] if row["old_logp"] else 0.0)
    job = overlap_job(row, row["rollout"], low, update * one["gpus"] / row["trainers"])
    return simulate(replace(job, max_staleness=1, in_flight=True), 6).step_seconds


def training_table(folder: Path) -> list[str]:
    rows = PUBLISHED["training"]["rows"]
    judged, costs = halves(rows)[1], COSTS["cuda"]
    lines = [
        "| run | GPU | | planned, s | published, s | ratio | model left out | planned, GiB | published, GiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds, memory = demand_of(row, folder).seconds(costs), "- | - | -"
        others = fit_training([r for r in halves(rows)[0] if r["model"] != row["model"]], folder)
        unseen = demand_of(row, folder).seconds(others) / row["seconds"]
        if row["type"] == "rl":  # their supervised training keeps all logits
            planned = planned_memory(row, folder) / GIB
            memory = f"{planned:.1f} | {row['memory_gib']:.1f} | {planned / row['memory_gib']:.2f}"
        lines.append(
            f"| {row['name']} | {row['device']} | {'judged' if row in judged else 'fitted'} | {seconds:.2f} | "
            f"{row['seconds']:.2f} | {seconds / row['seconds']:.2f} | {unseen:.2f} | {memory} |"
        )
    return lines


def steps_table(folder: Path) -> list[str]:
    rows = PUBLISHED["steps"]["rows"]
    judged = halves(rows)[1]
    lines = ["| run on H100 | | planned, s | published, s | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        seconds = step_seconds(row, folder, DECODE_COSTS["cuda"], COSTS["cuda"])
        kind = "judged" if row in judged else "fitted"
        lines.append(f"| {row['name']} | {kind} | {seconds:.1f} | {row['seconds']} | {seconds / row['seconds']:.2f} |")
    return lines


def overlap_table() -> list[str]:
    lines = ["| run | planned, s | published, s | ratio |", "|---|---|---|---|"]
    for row in PUBLISHED["overlap"]["rows"]:
        seconds = overlap_seconds(row)
        lines.append(f"| {row['name']} | {seconds:.0f} | {row['step']:.0f} | {seconds / row['step']:.2f} |")
    return lines


def write_table(key: str, text: str) -> None:
    """Replace the table between a page's markers `<!-- KEY -->` and `<!-- end -->`."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {key} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise SystemExit(f"docs/plan.md: has no markers for {key}")
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--fit", action="store_true", help="fit the costs and print them")
    cli.add_argument("--write", action="store_true", help="write the tables into docs/plan.md")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.fit:
            print_fit(folder)
            return
        tables = {"training": training_table(folder), "steps": steps_table(folder), "overlap": overlap_table()}
    for key, lines in tables.items():
        text = "\n".join(lines)
        print(f"\n## {key}\n\n{text}")
        if args.write:
            write_table(key, text)


def print_fit(folder: Path) -> None:
    fit, judge = halves(PUBLISHED["training"]["rows"])
    costs = fit_training(fit, folder)
    print("training:", {name: round(value, 4) for name, value in asdict(costs).items()})
    for title, rows in (("fitted", fit), ("judged", judge)):
        print(title, *(f"{ratio:.2f}" for ratio in (demand_of(r, folder).seconds(costs) / r["seconds"] for r in rows)))
    steps, others = halves(PUBLISHED["steps"]["rows"])
    decoding = fit_decoding(steps, folder, costs)
    print("decoding:", asdict(decoding))
    for title, rows in (("fitted", steps), ("judged", others)):
        print(title, *(f"{step_seconds(r, folder, decoding, costs) / r['seconds']:.2f}" for r in rows))


if __name__ == "__main__":
    main()
