"""W8: whole runs of SmolLM2-135M, from the command to a mean reward of 0.8, everything included.

`make bench KIND=multiplication ARGS="--model FOLDER"`. The task is docs/examples/multiplication: few-shot one-digit
products, 8 x 8 completions a step. grpocli samples with vLLM and with transformers; TRL samples with transformers,
because its ways to vLLM need CUDA (docs/evidence/benchmarks.md). All train with the same loss, learning rate and
reward, in bfloat16 autocast. Each round has another seed, and begins with another side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from run import HERE, PEER, measured, write
from workloads import Multiplication as W8

from grpocli.processes.libraries import shorten_spinning

MARK = "whole run with vLLM"
SIDES = {
    "grpocli, engine=vllm": ["grpocli", "vllm"],
    "grpocli, engine=transformers": ["grpocli", "transformers"],
    "TRL, transformers": ["trl"],
}


def overrides(folder: Path, model: str, seed: int, engine: str) -> list[str]:
    return [
        *("recipe=multiplication", f"model.path={model}", "model.dtype=bfloat16", f"engine={engine}"),
        *("eval.problems=0", "checkpoint.every=0", f"seed={seed}"),
        *(f"optim.lr={W8.rate}", f"train.steps={W8.steps}", f"hydra.run.dir={folder}"),
    ]


def watch_grpocli(folder: Path, model: str, seed: int, engine: str) -> dict[str, Any]:
    """Start a run, and stop it when it has arrived; the seconds at which each step's metrics appear."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    shorten_spinning(env)
    start, path = time.perf_counter(), folder / "metrics.jsonl"
    seconds: list[float] = []
    rows: list[dict[str, Any]] = []
    with folder.with_suffix(".log").open("w") as log:
        command = [str(Path(sys.executable).with_name("grpocli")), "train", *overrides(folder, model, seed, engine)]
        run = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=HERE.parents[1])
        try:
            while run.poll() is None and W8.arrived([row["reward"] for row in rows]) is None:
                time.sleep(0.05)
                lines = path.read_text().splitlines(keepends=True) if path.exists() else []
                for line in lines[len(rows) :]:
                    if line.endswith("\n"):
                        rows.append(json.loads(line))
                        seconds.append(time.perf_counter() - start)
        finally:
            run.terminate()
            run.wait(120)
    if len(rows) < W8.steps and W8.arrived([row["reward"] for row in rows]) is None:
        raise SystemExit(f"seed {seed}, {engine}: the run has failed\n{Path(log.name).read_text()[-2000:]}")
    tokens = [row["tokens/generated"] for row in rows]
    return {"seconds": seconds, "rewards": [row["reward"] for row in rows], "tokens": tokens}


def run_trl(model: str, seed: int, python: str) -> dict[str, Any]:
    start = time.time()
    command = [python, str(HERE / "multiplication_trl.py"), model, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["seconds"] = [stamp - start for stamp in found.pop("stamps")]
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, the least and the largest of the seeds that arrived."""
    names = ("steps", "s, from the command on", "s until the first step ended", "tokens generated")
    rows = [f"| to a mean reward of {W8.reward} | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    for side, runs in found.items():
        there = [(run, k) for run in runs if (k := W8.arrived(run["rewards"]))]
        late = len(runs) - len(there)
        lost = f" ({late} of {len(runs)} not in {W8.steps} steps, and left out)" if late else ""
        if not there:
            rows.append(f"| {side}{lost} | | | | |")
            continue
        figures = (
            [k for _, k in there],
            [run["seconds"][k - 1] for run, k in there],
            [run["seconds"][0] for run, _ in there],
            [sum(run["tokens"][:k]) for run, k in there],
        )
        cells = [f"{statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})" for each in figures]
        rows.append(f"| {side}{lost} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="SmolLM2-135M")
    parser.add_argument("--peer", metavar="PYTHON", default=str(PEER), help="of TRL's environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--print", action="store_true", help="leave the docs alone")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    with tempfile.TemporaryDirectory() as scratch:
        for number, seed in enumerate(args.seeds):
            first = number % len(args.sides)
            for side in args.sides[first:] + args.sides[:first]:
                kind, *engine = SIDES[side]
                folder = Path(scratch) / f"{kind}-{'-'.join(engine)}-{seed}"
                done = (
                    watch_grpocli(folder, args.model, seed, *engine)
                    if kind == "grpocli"
                    else run_trl(args.model, seed, args.peer)
                )
                found[side].append(done)
                k = W8.arrived(done["rewards"])
                said = f"{k} steps, {done['seconds'][k - 1]:.0f} s" if k else "has not arrived"
                print(f"seed {seed}: {side}: {said}", file=sys.stderr, flush=True)
    if not args.print:
        found = measured(MARK) | found
    text = table(found) + f"\n\n{len(args.seeds)} seeds."
    print(text)
    if not args.print:
        write(MARK, text, found)


if __name__ == "__main__":
    main()
