"""Step times of real runs beside simulated ones: `python bench/simulated.py --model FOLDER [--rounds N] [CASE ...]`.

Each case has synchronous runs, of which `grpocli plan --simulate --speeds RUN --lengths RUN` takes the speeds and
lengths, and another one, which it predicts. They are repeated in turns, since other programs may slow the machine.
Prints Markdown: the median step of each run without the first ones, the simulated steps, and the ratio.
For a CPU: servers and trainers have a core or a thread each. SmolLM2-135M is a good model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))
COMMON = [
    "recipe=multiplication",
    "hardware.device=cpu",
    "eval.problems=0",
    "checkpoint.every=0",
    "rollout.prompts_per_step=4",
    "rollout.max_completion_tokens=48",
]
PROCESSES = ["engine=transformers"]
HALF = "rollout.prompts_per_step=2"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """Runs to measure and a run to predict, by their overrides. env: of all. prefix: of the command."""

    measured: list[list[str]]
    predicted: list[str]
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()


CASES = {
    "overlap": Case(
        [["engine=vllm"]],
        ["engine=vllm", "rollout.max_staleness=1"],
        ONE_THREAD | {"VLLM_CPU_OMP_THREADS_BIND": "1"},
        ("taskset", "-c", "0,1"),
    ),
    "two processes": Case(
        [[*PROCESSES, "hardware.processes=1"], [*PROCESSES, "hardware.processes=1", HALF]],
        [*PROCESSES, "hardware.processes=2"],
        ONE_THREAD,
    ),
    "two servers": Case(
        [["engine=vllm"], ["engine=vllm", HALF]],
        ["engine=vllm", "engine.replicas=2"],
        ONE_THREAD | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ),
}


def trained(case: Case, overrides: list[str], args: argparse.Namespace, folder: Path) -> float:
    """The median step of a run, without the first two steps."""
    options = [*COMMON, f"model.path={args.model}", f"train.steps={args.steps}", *overrides, f"hydra.run.dir={folder}"]
    command = [*case.prefix, GRPOCLI, "train", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **case.env})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["time/step"] for row in rows[2:])


def simulated(overrides: list[str], args: argparse.Namespace, runs: list[Path]) -> float:
    """The step that the command predicts from runs."""
    options = [*COMMON, f"model.path={args.model}", *overrides]
    speeds = [word for run in runs for word in ("--speeds", str(run))]
    command = [GRPOCLI, "plan", "--simulate", "--json", *speeds, "--lengths", str(runs[0]), *options]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(ended.stdout)["simulation"]
    return next(row["step_seconds"] for row in found["rows"] if row["nodes"] == found["planned"])


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(CASES)}; default: all")
    cli.add_argument("--model", required=True, help="a folder with SmolLM2-135M, or another small model")
    cli.add_argument("--steps", type=int, default=10)
    cli.add_argument("--rounds", type=int, default=2)
    args = cli.parse_args()
    print("| case | measured run, s | simulated, s | predicted run, s | simulated, s | simulated / predicted run |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in args.cases or CASES:
        case = CASES[name]
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                runs = [Path(folder) / f"measured-{i}" for i in range(len(case.measured))]
                first, *_ = [trained(case, own, args, run) for own, run in zip(case.measured, runs, strict=True)]
                second = trained(case, case.predicted, args, Path(folder) / "predicted")
                again, ahead = (simulated(own, args, runs) for own in (case.measured[0], case.predicted))
            ratio = ahead / second
            print(f"| {name} | {first:.2f} | {again:.2f} | {second:.2f} | {ahead:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
