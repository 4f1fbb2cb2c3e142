"""Time, memory and tokens per second with one and two trainer processes: `python bench/scaling.py [--model DIR]`.

Runs the same steps on this machine's CPU, sampled by transformers: one process with one thread, one process with all
cores, and two processes that share the cores, for each `hardware.parallel`; `--rounds` times, alternating. Prints
medians over the steps after the first of each run, as Markdown rows. Memory is the largest resident size of a trainer
process, libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from memory import GIB, GRPOCLI, make_model

WAYS = {
    "1 process, 1 thread": (["hardware.processes=1"], "1"),
    "1 process, 2 threads": (["hardware.processes=1"], "2"),
    "2 processes, ddp": (["hardware.processes=2", "hardware.parallel=ddp"], "1"),
    "2 processes, fsdp2": (["hardware.processes=2", "hardware.parallel=fsdp2"], "1"),
}
SHOWN = ("time/step", "time/rollout", "time/train")


BATCH = [
    *("hardware.device=cpu", "task=arithmetic", "eval.problems=0", "checkpoint.every=0"),
    *("rollout.prompts_per_step=8", "rollout.group_size=8", "rollout.max_completion_tokens=54"),
    *("rollout.max_prompt_tokens=10", "train.micro_batch_tokens=2048"),
]


def measured(way: str, model: list[str], steps: int) -> dict[str, float]:
    """The medians of one run."""
    overrides, threads = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        options = [*BATCH, *model, *overrides, f"train.steps={steps}", f"hydra.run.dir={folder}/run"]
        env = {**os.environ, "OMP_NUM_THREADS": threads}
        run = subprocess.Popen([GRPOCLI, "train", *options], stdout=subprocess.DEVNULL, env=env)
        _, status, used = os.wait4(run.pid, 0)
        if status:
            raise SystemExit(f"grpocli train {' '.join(options)}: exit code {os.waitstatus_to_exitcode(status)}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    found = {name: statistics.median(row[name] for row in rows) for name in SHOWN}
    tokens = statistics.median(row["tokens/trained"] / row["time/step"] for row in rows)
    return found | {"tokens/s": tokens, "GiB": used.ru_maxrss * 1024 / GIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("30M", "135M"), default="30M", help="random weights, made on the spot")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args.model, Path(folder) / args.model)
        for _ in range(args.rounds):
            for way in WAYS:
                found[way].append(measured(way, model, args.steps))
    names = [*SHOWN, "tokens/s", "GiB"]
    print(f"| {args.model}, float32 | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for way, runs in found.items():
        print(
            f"| {way} | " + " | ".join(f"{statistics.median(run[name] for run in runs):.2f}" for name in names) + " |"
        )


if __name__ == "__main__":
    main()
