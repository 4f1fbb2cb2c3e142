"""Plans beside published figures of other frameworks: `python bench/plans.py [--fit] [--write]`.

`bench/published.json` has the figures, their configs and sources. Half of the rows fit the
costs in `grpocli_tools/plan/times.py`, the other half is held out. The rule: rows with the same name (the same
work on other GPUs) belong together; of the names in alphabetical order the first, third, ... are fitted, the second,
fourth, ... held out. Rows on an A6000 or A100 are always held out.

Prints the tables as Markdown. --fit prints the costs that the fit gives. --write puts the tables into
docs/evidence/plan.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpocli.composition.compose import build_run, compose
from grpocli_tools.plan.memory import VLLM
from grpocli_tools.plan.plan import Plan, make_plan
from grpocli_tools.plan.resources import GIB, DeviceOptions
from grpocli_tools.plan.simulate import Job, LogNormal, Speeds, simulate
from grpocli_tools.plan.sweep import nonnegative_fit
from grpocli_tools.plan.times import COSTS, DECODE_COSTS, DecodeCosts, Decoding, Demand, TrainingStep

Row = dict[str, Any]

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "plan.md"
PROMPT, SPREAD = 128, 0.6  # not published: assumed
SLOTS, LINK = 1024, 25e9  # sequences of a server; bytes per second from trainers to servers
LIBRARIES = "libraries"  # not in the published memory, which counts torch's allocator
FLOAT32, BFLOAT16 = 4, 2  # bytes
UTILIZATION = {False: 0.6, True: 0.8}  # of a GPU's memory by vLLM, in NeMo RL's configs: on policy, off policy
FITTED_ON = ("H100", "H100 PCIe", "H200")
KNOWN = COSTS["cuda"].part("weights", "network", "layers")  # assumed, not fitted
LEAST = replace(KNOWN, linear=1.25, attention=1.25, attention_3=1.25, activations=1.0)
"""The least costs: no product reaches more than 80 % of the peak. Adapters and logits may cost nothing."""
THEIR_HEAD = 16.06
"""The fitted cost of prime-rl's output head, which is not this program's; of logits."""
ADAPTERS = 4
"""Adapters that prime-rl has room for in its benchmarks (`MAX_LORAS`), of which one is trained."""
OVERHEAD = 0.37
"""What a published step of NeMo RL takes beyond the simulated one, as a share; fitted."""


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The fitted rows and those held out, by the rule above."""
    names = sorted({row["name"] for row in rows if _fits(row)})
    fitting = set(names[::2])
    fit = [row for row in rows if row["name"] in fitting and _fits(row)]
    return fit, [row for row in rows if row not in fit]


def half_of(row: Row, rows: Sequence[Row]) -> str:
    """What the row is used for, as the tables say it."""
    return "fitted" if row in halves(rows)[0] else "held out"


def _fits(row: Row) -> bool:
    return row.get("device", "H100") in FITTED_ON


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
    ]


@functools.cache
def _plan(overrides: tuple[str, ...], gpu: str, gpus: int, traced: bool) -> Plan:
    return make_plan(build_run(compose(list(overrides))), DeviceOptions(devices=gpus, gpu=gpu), trace_memory=traced)


def training_plan(row: Row, folder: Path, traced: bool = False) -> Plan:
    overrides = (*model_override(row["model"], folder), *training_overrides(row))
    return _plan(overrides, row["device"], row["gpus"], traced)


def demand_of(row: Row, folder: Path) -> Demand:
    """The work of each GPU in a row's step. prime-rl adds LoRA to every layer, the experts of mixtures included."""
    plan = training_plan(row, folder)
    size = replace(plan.size, adapted=plan.size.moved if row["lora_rank"] else 0)
    step = TrainingStep.of(replace(plan, size=size))
    return replace(step, flash_3=row["attention"] == "flash_attention_3").demand()


def their_costs() -> Demand:
    """The program's costs, with the head of prime-rl."""
    return replace(COSTS["cuda"], logits=THEIR_HEAD)


def fit_training(rows: Sequence[Row], folder: Path) -> Demand:
    """The costs with the least squares of relative errors, none below `LEAST`."""
    demands = np.array([demand_of(row, folder).values() for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    least, known = np.array(LEAST.values()), np.array(KNOWN.values())
    used = demands.any(axis=0) & (known == 0)
    relative, missing = demands / seconds[:, None], 1 - demands @ least / seconds
    found = least.copy()
    found[used] += nonnegative_fit(relative[:, used], missing)
    return Demand(*map(float, found))


def planned_memory(row: Row, folder: Path) -> float:
    """Bytes of torch's allocator during the update, of one GPU."""
    items = training_plan(row, folder, traced=True).devices[0].items
    return sum(item.update for item in items if item.name != LIBRARIES) + expert_adapters(row, folder)


def expert_adapters(row: Row, folder: Path) -> float:
    """Bytes of prime-rl's updates of a mixture's experts, which this program does not have (`model.lora`).

    All adapters' weights are held in float32, and gathered in bfloat16 for two layers at a time; one has a gradient and
    two moments.
    """
    size = training_plan(row, folder).size
    if not row["lora_rank"] or not size.experts:
        return 0.0
    text = size.config.get_text_config()
    widths = text.hidden_size + text.moe_intermediate_size
    experts = size.experts // (3 * text.hidden_size * text.moe_intermediate_size)  # of all layers; three matrices each
    numbers = experts * 3 * row["lora_rank"] * widths
    held = FLOAT32 * (ADAPTERS + 3) * numbers / row["gpus"]
    return float(held + 2 * BFLOAT16 * ADAPTERS * numbers / size.layers)


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
    carries the gradients once. It computes the policy's log-probs before the update, too. Its asynchronous runs
    generate the prompts of several steps at a time, so those of `staleness + 1` steps are simulated as one.
    """
    plan, at_once = step_plan(row, folder), row["staleness"] + 1
    shared, tp = not row["rollout_gpus"], row["tensor_parallel"]
    trainers = row["gpus"] - row["rollout_gpus"]
    mean, longest = row["mean"] - PROMPT, row["longest"] - PROMPT
    resources = replace(plan.resources, trainers=trainers, tensor_parallel=tp, link=min(plan.resources.link, 400e9))
    plan = replace(plan, resources=resources)
    step = TrainingStep.of(plan, PROMPT, mean)
    step = replace(step, prompts=row["prompts"] * row["group"], shards=1, scoring=step.scoring + 1)
    seconds = step.demand().seconds(training)
    servers = (row["gpus"] if shared else row["rollout_gpus"]) // tp
    most = min(_slots(row, plan), math.ceil(at_once * row["prompts"] / servers) * row["group"])
    decoder = Decoding(plan, PROMPT + mean / 2, costs)
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
        in_order=not row["staleness"],
    )


def _slots(row: Row, plan: Plan) -> int:
    """Sequences that a server's KV cache has room for, at their mean length, as `running_sequences` counts."""
    tp, size = row["tensor_parallel"], plan.size
    weights = BFLOAT16 * size.parameters / tp
    cache = tp * (UTILIZATION[row["staleness"] > 0] * plan.resources.memory - weights - VLLM["cuda"])
    return min(SLOTS, int(cache / (BFLOAT16 * size.cache_per_token * row["mean"])))


@functools.cache
def _lengths(mean: float, spread: float, longest: int) -> LogNormal:
    return LogNormal.with_mean(mean, spread, longest)


def step_seconds(row: Row, folder: Path, costs: DecodeCosts, training: Demand, overhead: float = 0.0) -> float:
    job = step_job(row, folder, costs, training)
    return float((1 + overhead) * simulate(job, 5).step_seconds / (row["staleness"] + 1))


def fit_overhead(rows: Sequence[Row], folder: Path, costs: DecodeCosts, training: Demand) -> float:
    """The share of a step with the least squares of logarithms."""
    ratios = [row["seconds"] / step_seconds(row, folder, costs, training) for row in rows]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1


def decoder_of(row: Row, folder: Path, costs: DecodeCosts) -> Decoding:
    """The server of a row of decoding rates."""
    overrides = (*model_override(row["model"], folder), "model.head_dtype=null", "engine=transformers")
    plan = _plan((*overrides, "hardware.device=cuda"), row["device"], 1, False)
    resources = replace(plan.resources, tensor_parallel=row["tensor_parallel"])
    return Decoding(replace(plan, resources=resources), row["context"], costs)


def decode_ratio(row: Row, folder: Path, costs: DecodeCosts) -> float:
    """Planned and published time for a token of each sequence."""
    return float(1e3 * decoder_of(row, folder, costs).seconds(row["sequences"]) / row["ms"])


def fit_decoding(rows: Sequence[Row], folder: Path) -> DecodeCosts:
    """The costs of a grid with the least squares of logarithms. Its ends are bounds."""
    grid = itertools.product(
        (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4),
        (DECODE_COSTS["cuda"].compute,),
        (6e-4, 7e-4, 8e-4, 9e-4, 1e-3, 1.1e-3, 1.2e-3),
        (0.0, 2.5e-5, 5e-5, 7.5e-5, 1e-4),
        (0.0, 2.5e-6, 5e-6, 7.5e-6, 1e-5, 1.5e-5, 2e-5),
    )

    decoders = [(decoder_of(row, folder, DECODE_COSTS["cuda"]), row["sequences"], row["ms"] / 1e3) for row in rows]

    def error(costs: DecodeCosts) -> float:
        return sum(math.log(replace(one, costs=costs).seconds(n) / seconds) ** 2 for one, n, seconds in decoders)

    return min((DecodeCosts(*values) for values in grid), key=error)


def overlap_job(row: Row, gpus: int, mean: float, update: float) -> Job:
    """A run of verl whose completions are generated on `gpus`."""
    overrides = ("model=qwen2.5-math-7b", "model.head_dtype=null", "engine=transformers", "hardware.device=cuda")
    plan = _plan(overrides, "H20", 1, False)
    servers = gpus // row["tensor_parallel"]
    slots = min(SLOTS, math.ceil(row["prompts"] / servers) * row["group"])
    resources = replace(plan.resources, tensor_parallel=row["tensor_parallel"])
    decoder = Decoding(replace(plan, resources=resources), mean / 2, DECODE_COSTS["cuda"])
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
        job = overlap_job(row, one["gpus"], mean, 0.0)
        seconds = simulate(job, 2).steps[-1].seconds - job.speeds.sync
        low, high = (mean, high) if seconds < one["gen"] else (low, mean)
    update = one["update"] + (one["old_logp"] if row["old_logp"] else 0.0)
    job = overlap_job(row, row["rollout"], low, update * one["gpus"] / row["trainers"])
    return simulate(
        replace(job, max_staleness=1, in_flight=(flight := "partial rollouts" in row["name"]), in_order=not flight), 6
    ).step_seconds


def training_table(folder: Path) -> list[str]:
    rows = PUBLISHED["training"]["rows"]
    costs = their_costs()
    lines = [
        "| run | GPU | | planned, s | published, s | ratio | model left out | planned, GiB | published, GiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds, memory = demand_of(row, folder).seconds(costs), "- | - | -"
        others = fit_training([r for r in halves(rows)[0] if r["model"] != row["model"]], folder)
        unseen = demand_of(row, folder).seconds(others) / row["seconds"]
        if row["type"] == "rl" and not row["offload"]:  # their supervised training keeps all logits
            planned = planned_memory(row, folder) / GIB
            memory = f"{planned:.1f} | {row['memory_gib']:.1f} | {planned / row['memory_gib']:.2f}"
        lines.append(
            f"| {row['name']} | {row['device']} | {half_of(row, rows)} | {seconds:.2f} | "
            f"{row['seconds']:.2f} | {seconds / row['seconds']:.2f} | {unseen:.2f} | {memory} |"
        )
    return lines


def steps_table(folder: Path) -> list[str]:
    rows = PUBLISHED["steps"]["rows"]
    lines = [
        "| run on H100 | | simulated, s | published, s | ratio | ratio with the overhead |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = step_seconds(row, folder, DECODE_COSTS["cuda"], COSTS["cuda"])
        ratio = seconds / row["seconds"]
        lines.append(
            f"| {row['name']} | {half_of(row, rows)} | {seconds:.1f} | {row['seconds']} | {ratio:.2f} | "
            f"{(1 + OVERHEAD) * ratio:.2f} |"
        )
    return lines


def decode_table(folder: Path) -> list[str]:
    rows = PUBLISHED["decode"]["rows"]
    lines = ["| server | | planned, ms | published, ms | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        ratio, half = decode_ratio(row, folder, DECODE_COSTS["cuda"]), half_of(row, rows)
        lines.append(f"| {row['name']} | {half} | {ratio * row['ms']:.2f} | {row['ms']:.2f} | {ratio:.2f} |")
    return lines


def overlap_table() -> list[str]:
    lines = ["| run | planned, s | published, s | ratio |", "|---|---|---|---|"]
    for row in PUBLISHED["overlap"]["rows"]:
        seconds = overlap_seconds(row)
        lines.append(f"| {row['name']} | {seconds:.0f} | {row['step']:.0f} | {seconds / row['step']:.2f} |")
    return lines


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "training": training_table,
    "decode": decode_table,
    "steps": steps_table,
    "overlap": lambda _: overlap_table(),
}


def write_table(key: str, text: str) -> None:
    """Replace the table between a page's markers `<!-- KEY -->` and `<!-- end -->`."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {key} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise SystemExit(f"docs/evidence/plan.md has no markers for {key}")
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--fit", action="store_true", help="fit the costs and print them")
    cli.add_argument("--write", action="store_true", help="write the tables into docs/evidence/plan.md")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.fit:
            print_fit(folder)
            return
        for key, table in TABLES.items():
            print(f"planning {len(PUBLISHED[key]['rows'])} rows of {key} ...", file=sys.stderr)
            text = "\n".join(table(folder))
            print(f"\n## {key}\n\n{text}", flush=True)
            if args.write:
                write_table(key, text)


def print_fit(folder: Path) -> None:
    fit, held_out = halves(PUBLISHED["training"]["rows"])
    costs = fit_training(fit, folder)
    print("training:", _rounded(costs))
    print("training, fitted to the other half:", _rounded(fit_training([r for r in held_out if _fits(r)], folder)))
    for title, rows in (("fitted", fit), ("held out", held_out)):
        print(title, *(f"{ratio:.2f}" for ratio in (demand_of(r, folder).seconds(costs) / r["seconds"] for r in rows)))
    fit, held_out = halves(PUBLISHED["decode"]["rows"])
    decoding = fit_decoding(fit, folder)
    print("decoding:", asdict(decoding))
    print("decoding, fitted to the other half:", asdict(fit_decoding([r for r in held_out if _fits(r)], folder)))
    for title, rows in (("fitted", fit), ("held out", held_out)):
        print(title, *(f"{decode_ratio(r, folder, decoding):.2f}" for r in rows))
    steps, others = halves(PUBLISHED["steps"]["rows"])
    training = replace(costs, logits=COSTS["cuda"].logits)
    overhead = fit_overhead(steps, folder, decoding, training)
    print(f"overhead of steps: {overhead:.3f}")
    for title, rows in (("fitted", steps), ("held out", others)):
        print(title, *(f"{step_seconds(r, folder, decoding, training, overhead) / r['seconds']:.2f}" for r in rows))


def _rounded(costs: Demand) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(costs).items()}


if __name__ == "__main__":
    main()
