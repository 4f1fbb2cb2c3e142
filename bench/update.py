"""Seconds and memory of updates on given completions: `python bench/update.py --model FOLDER [WORKLOAD ...]`.

The update of a step alone, without sampling, of a model in bfloat16 autocast on this machine's CPU: rows end to end
with prompts once (`train.packed=true`), and side by side with padding. Each in a process of its own, in turn; medians
over the updates after the first, as Markdown rows.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Workload:
    """groups of rows; longest: tokens of a completion, all of them or, skewed, a few (log-normal lengths).

    constant: share of the groups whose rewards are all equal.
    """

    groups: int = 2
    rows: int = 8
    prompt: int = 12
    longest: int = 64
    skewed: bool = False
    constant: float = 0.0


WORKLOADS = {
    "W2": Workload(),
    "W3": Workload(prompt=512, longest=32),
    "W4": Workload(longest=256, skewed=True),
    "W5": Workload(constant=0.5),
}


def lengths(work: Workload, draw: random.Random) -> list[int]:
    """Of all completions."""
    if not work.skewed:
        return [work.longest] * (work.groups * work.rows)
    drawn = (int(draw.lognormvariate(0, 0.8) * work.longest / 6) for _ in range(work.groups * work.rows))
    return [max(1, min(work.longest, length)) for length in drawn]


def measured(folder: str, work: Workload, packed: bool, updates: int) -> dict[str, float]:
    """In this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpocli import build_algorithm
    from grpocli.config.schema import Train
    from grpocli.data import Sampling
    from grpocli.launch.hardware import Single
    from grpocli.training.batch import Row
    from grpocli.training.optim import AdamW
    from grpocli.training.packing import pack
    from grpocli.training.policy import Policy
    from grpocli.training.update import Updater
    from grpocli.training.world import World

    world, optim = World(Single(device="cpu")), AdamW(lr=1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wrapped, optimizer = world.parallel.share(model, torch.float32, optim.make)
    policy = Policy(model, wrapped, torch.bfloat16, world.parallel)
    if packed and not pack(policy, None):
        raise SystemExit("this model does not take rows end to end")
    algorithm = build_algorithm("algorithm=dapo")
    up = Updater(world, policy, None, algorithm, optim, optimizer, Train(), Sampling(work.longest), 1000)
    draw, times = random.Random(0), []
    for step in range(updates):
        each = iter(lengths(work, draw))
        rows = []
        for group in range(work.groups):
            prompt = [draw.randrange(10, 400) for _ in range(work.prompt)]
            flat = group < work.constant * work.groups
            for k in range(work.rows):
                ids = [draw.randrange(10, 400) for _ in range(next(each))]
                advantage = 0.0 if flat else (1.0 if k % 2 else -1.0)
                rows.append(Row(prompt, ids, [1] * len(ids), advantage, group, [-3.0] * len(ids)))
        began = time.perf_counter()
        up.step(rows, work.groups, step)
        times.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(times[1:]),
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--model", required=True, help="a folder with the model")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        name, layout = args.only.split("/")
        print(json.dumps(measured(args.model, WORKLOADS[name], layout == "packed", args.updates)))
        return
    print("| | packed, s | padded, s | ratio | packed, GiB | padded, GiB | ratio |\n|---|---|---|---|---|---|---|")
    for name in args.workloads or WORKLOADS:
        found: dict[str, list[dict[str, float]]] = {"packed": [], "padded": []}
        for _ in range(args.rounds):
            for layout, runs in found.items():
                command = [sys.executable, __file__, "--model", args.model, "--only", f"{name}/{layout}"]
                answer = subprocess.run(
                    [*command, "--updates", str(args.updates)], stdout=subprocess.PIPE, text=True, check=True
                )
                runs.append(json.loads(answer.stdout.splitlines()[-1]))
        cells = []
        for what in ("seconds", "GiB"):
            ours, theirs = (statistics.median(run[what] for run in found[layout]) for layout in ("packed", "padded"))
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        print(f"| {name}: {asdict(WORKLOADS[name])} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
