"""All weights, LoRA and QLoRA on one model: memory planned and measured, step time, reward.

    python bench/small_gpus.py FOLDER_OF_SMOLLM2 [KIND ...]

Runs recipes/multiplication.yaml from the repository's root with each kind in turn, and prints Markdown rows. Memory is
the largest resident size of the process, less that of the same run with the built-in model and tiny batches (the
libraries). The step time is the median after the first two steps; it means something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from memory import GIB, LEAST, SHORT, peak, planned, quoted

STEPS = 20
LORA = ["model.lora.rank=16", "optim.lr=2e-4"]
KINDS = {
    "all weights": [],
    "all weights, `optim=adamw_8bit`": ["optim=adamw_8bit"],
    "LoRA": LORA,
    "QLoRA": [*LORA, "model.quantization=nf4"],
    "QLoRA, `optim=adamw_8bit`": [*LORA, "model.quantization=nf4", "optim=adamw_8bit"],
}
RECIPE = ["recipe=multiplication", "engine=transformers", f"train.steps={STEPS}", "checkpoint.every=0"]
RECIPE += ["hardware.device=cpu", "model.dtype=bfloat16", "eval.problems=0"]


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("model", metavar="FOLDER_OF_SMOLLM2")
    cli.add_argument("kinds", nargs="*", metavar="KIND", choices=KINDS, help=f"of {quoted(KINDS)}")
    args = cli.parse_args()
    model, given = args.model, args.kinds
    libraries = peak([*SHORT, *LEAST]) / GIB
    print(f"libraries: {libraries:.2f} GiB\n")
    print(
        "| trained | planned, GiB | measured, GiB | step, s | reward, first and last 5 steps |\n|---|---|---|---|---|"
    )
    for name in given or list(KINDS):
        overrides = [*RECIPE, f"model.path={model}", *KINDS[name]]
        with tempfile.TemporaryDirectory() as folder:
            measured = peak(overrides, folder=Path(folder)) / GIB - libraries
            rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "reward" in row]
        seconds = statistics.median(row["time/step"] for row in rows[2:])
        first, last = (statistics.mean(row["reward"] for row in part) for part in (rows[:5], rows[-5:]))
        plan = planned(overrides) / GIB
        print(f"| {name} | {plan:.2f} | {measured:.2f} | {seconds:.2f} | {first:.2f}, {last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
