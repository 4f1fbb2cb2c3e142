"""Seconds per step with and without overlap of sampling and training: `python bench/overlap.py`.

Runs `recipe=multiplication` with 16 longer completions a step and `engine=vllm`, with each `rollout.max_staleness` of
`--staleness` in turn, and compares with the longer of sampling and training. On a CPU both would share the cores and
gain nothing, so vLLM is bound to one of two cores and the trainer has one thread; on a GPU machine nothing is bound.
Prints medians over the steps after the first two, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))


def overrides(staleness: int, model: str, steps: int, tokens: int) -> list[str]:
    return [
        *("recipe=multiplication", f"model.path={model}", "engine=vllm", "eval.problems=0", "checkpoint.every=0"),
        *("rollout.prompts_per_step=2", f"rollout.max_completion_tokens={tokens}", f"train.steps={steps}"),
        f"rollout.max_staleness={staleness}",
    ]


def rows(staleness: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of a run's steps, without the first two."""
    options = overrides(staleness, args.model, args.steps, args.tokens)
    env, prefix = dict(os.environ), []
    if not args.unbound:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "1", "OMP_NUM_THREADS": "1"}
        prefix = ["taskset", "-c", "0,1"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*prefix, GRPOCLI, "train", *options, f"hydra.run.dir={folder}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][2:]


def median(rows: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(row[name] for row in rows), 3)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", required=True, help="a folder with SmolLM2-135M, or another small model")
    cli.add_argument("--steps", type=int, default=7)
    cli.add_argument("--tokens", type=int, default=32)
    cli.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    cli.add_argument("--unbound", action="store_true", help="leave the cores alone (GPU machines)")
    args = cli.parse_args()
    now, *ahead = [rows(staleness, args) for staleness in (0, *args.staleness)]
    bound = max(median(now, "time/rollout"), median(now, "time/train"))
    found = {
        "generation": median(now, "time/rollout"),
        "training": median(now, "time/train"),
        "sync": median(now, "time/sync"),
        "max(generation, training)": bound,
        "step, max_staleness=0": median(now, "time/step"),
    }
    for staleness, steps in zip(args.staleness, ahead, strict=True):
        seconds = median(steps, "time/step")
        found |= {f"step, max_staleness={staleness}": seconds, f"ratio to max, {staleness}": round(seconds / bound, 3)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
