"""Step times of real runs beside simulated ones: `python bench/simulated.py [--model FOLDER] [--rounds N] [CASE ...]`.

Each case has synchronous runs, of which `grpocli plan --simulate --speeds RUN --lengths RUN` takes the speeds and
lengths, and another one, which it predicts. They are repeated in turns, since other programs may slow the machine.
Prints Markdown: the median step of each run without the first ones, the simulated steps, and the ratio.

Cases that begin with "paced" train the built-in model with servers that sleep (`bench/paced.py`), so that they say
something on a busy machine, too. The others need a quiet CPU and --model, such as SmolLM2-135M; servers and trainers
have a core or a thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))
PACED = Path(__file__).with_name("paced.py")
START = 300.0  # seconds for a paced server to start
COMMON = ["hardware.device=cpu", "eval.problems=0", "checkpoint.every=0"]
REWARD = f"reward.python.function={PACED}:alternating"
REAL = ["recipe=multiplication", REWARD, "rollout.prompts_per_step=4", "rollout.max_completion_tokens=48"]
SLEEPING = [
    "engine=vllm",
    f"algorithm/objective={PACED}:Paced",
    "reward=[python]",
    REWARD,
    "rollout.prompts_per_step=8",
    "rollout.group_size=8",
    "rollout.max_completion_tokens=48",
    "rollout.max_prompt_tokens=10",
    "train.micro_batch_tokens=65536",
    "model.warm_start_steps=20",
    "sync.tolerance=1e9",  # the servers' tokens and log-probs are no model's
    "sync.canary=false",
    "rollout.max_prob_error=null",
]
PROCESSES = ["engine=transformers"]
HALF = "rollout.prompts_per_step=2"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """Runs to measure and a run to predict, by their overrides. env: of all. prefix: of the command.

    servers: paced ones, of the measured run and of the predicted one.
    """

    measured: list[list[str]]
    predicted: list[str]
    env: dict[str, str] = field(default_factory=lambda: ONE_THREAD)
    prefix: tuple[str, ...] = ()
    servers: tuple[int, int] = (0, 0)


CASES = {
    "paced, two servers": Case([[]], [], servers=(1, 2)),
    "overlap": Case(
        [["engine=vllm"]],
        ["engine=vllm", "rollout.max_staleness=1"],
        ONE_THREAD | {"VLLM_CPU_OMP_THREADS_BIND": "1"},
        ("taskset", "-c", "0,1"),
    ),
    "two processes": Case(
        [[*PROCESSES, "hardware.processes=1"], [*PROCESSES, "hardware.processes=1", HALF]],
        [*PROCESSES, "hardware.processes=2"],
    ),
    "two servers": Case(
        [["engine=vllm"], ["engine=vllm", HALF]],
        ["engine=vllm", "engine.replicas=2"],
        ONE_THREAD | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ),
}


@contextmanager
def paced_server(*options: str) -> Iterator[str]:
    """The address of a server that sleeps. options: of `bench/paced.py`."""
    with tempfile.TemporaryFile("w+") as out:
        env = {**os.environ, **ONE_THREAD}
        command = [sys.executable, str(PACED), *options]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, env=env)
        try:
            deadline = time.monotonic() + START
            while not (url := _address(out.fileno())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{PACED} does not serve")
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait()


def _address(file: int) -> str:
    return os.pread(file, 1 << 16, 0).decode().partition("serves at ")[2].strip()


def trained(case: Case, options: list[str], steps: int, folder: Path) -> float:
    """The median step of a run, without the first two steps."""
    command = [*case.prefix, GRPOCLI, "train", *options, f"train.steps={steps}", f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **case.env})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(row["time/step"] for row in rows[2:]))


def simulated(options: list[str], runs: list[Path]) -> float:
    """The step that the command predicts from runs."""
    speeds = [word for run in runs for word in ("--speeds", str(run))]
    command = [GRPOCLI, "plan", "--simulate", "--json", *speeds, "--lengths", str(runs[0]), *options]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(ended.stdout)["simulation"]
    return float(next(row["step_seconds"] for row in found["rows"] if row["nodes"] == found["planned"]))


def options_of(case: Case, overrides: list[str], servers: list[str], model: str) -> list[str]:
    own = [*SLEEPING, f"engine.base_url=[{','.join(servers)}]"] if servers else [*REAL, f"model.path={model}"]
    return [*COMMON, *own, *overrides]


def measure(name: str, case: Case, args: argparse.Namespace, folder: Path) -> None:
    """Run a case once and print its row."""
    with ExitStack() as running:
        urls = [running.enter_context(paced_server()) for _ in range(max(case.servers))]
        before = [options_of(case, own, urls[: case.servers[0]], args.model) for own in case.measured]
        after = options_of(case, case.predicted, urls[: case.servers[1]], args.model)
        runs = [folder / f"measured-{i}" for i in range(len(before))]
        first, *_ = [trained(case, own, args.steps, run) for own, run in zip(before, runs, strict=True)]
        second = trained(case, after, args.steps, folder / "predicted")
        again, ahead = (simulated(own, runs) for own in (before[0], after))
    print(f"| {name} | {first:.2f} | {again:.2f} | {second:.2f} | {ahead:.2f} | {ahead / second:.2f} |", flush=True)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(map(shlex.quote, CASES))
    cli.add_argument("cases", nargs="*", metavar="CASE", choices=CASES, help=f"of {names}; all by default")
    cli.add_argument("--model", default="", help="a folder with SmolLM2-135M, or another small model")
    cli.add_argument("--steps", type=int, default=8, help="of each run (8)")
    cli.add_argument("--rounds", type=int, default=1, help="rows of each case (1)")
    args = cli.parse_args()
    print("| case | measured run, s | simulated, s | predicted run, s | simulated, s | simulated / predicted run |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in args.cases or CASES:
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                measure(name, CASES[name], args, Path(folder))


if __name__ == "__main__":
    main()
