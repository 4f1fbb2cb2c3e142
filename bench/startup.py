"""Seconds from a command to its first sampled token, stage by stage: `python bench/startup.py [--vllm FOLDER]`.

Runs `grpocli train` and notes when each stage of its output begins. Sampling begins when the prompts of the first
evaluation go to the engine. Beside it stands what no trainer of this kind avoids: an empty Python that imports torch
and the class of the model. `--vllm FOLDER` adds a run of the model in FOLDER with engine=vllm, and vLLM's own server.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from grpocli.rollout.vllm.server import free_port

GRPOCLI = str(Path(sys.executable).with_name("grpocli"))
FLOOR = "from transformers import LlamaForCausalLM"
STAGES = ("starting engine", "loading libraries", "loading the data", "loading the model", "syncing", "evaluating")
SAMPLES = "evaluating"
SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.problems=4", "checkpoint.every=0")
"""So that the step after the first token does not take minutes."""
LONGEST_START = 600
"""Seconds that vLLM's server may take."""


def stages(*options: str) -> dict[str, float]:
    """Seconds from the command to the begin of each stage of a run of one step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [GRPOCLI, "train", "train.steps=1", f"hydra.run.dir={folder}/run", *options]
        start, begins = time.perf_counter(), dict[str, float]()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            for line in run.stdout or ():
                for stage in STAGES:
                    if line.startswith(stage):
                        begins.setdefault(stage, time.perf_counter() - start)
        if run.returncode or SAMPLES not in begins:
            raise SystemExit(f"the run ended with {run.returncode} before it sampled")
    return begins


def seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def table(rounds: int, *options: str) -> None:
    runs = [stages(*options) for _ in range(rounds)]
    medians = {name: statistics.median(run[name] for run in runs) for name in STAGES if all(name in r for r in runs)}
    print("| stage begins after | s |\n|---|---|")
    for name, at in medians.items():
        print(f"| {'the first token is sampled' if name == SAMPLES else name} | {at:.2f} |")


def vllm_alone(folder: str) -> float:
    """Seconds until vLLM's own server of the model answers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "512"]
    quiet = subprocess.DEVNULL
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        while not _answers(port):
            if server.poll() is not None or time.perf_counter() - start > LONGEST_START:
                raise SystemExit("vLLM did not start")
            time.sleep(0.1)
        return time.perf_counter() - start
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # with vLLM's own processes
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--vllm", metavar="FOLDER", help="a folder with a model, for engine=vllm")
    cli.add_argument("--rounds", type=int, default=3, help="repetitions of each run (3)")
    args = cli.parse_args()
    stages()  # the warm start and the caches
    table(args.rounds)
    floor = statistics.median(seconds([sys.executable, "-c", FLOOR]) for _ in range(args.rounds))
    print(f"\nan empty Python that imports torch and the model's class: {floor:.2f} s\n")
    if args.vllm:
        table(args.rounds, "engine=vllm", "recipe=multiplication", f"model.path={args.vllm}", *SMALL)
        alone = statistics.median(vllm_alone(args.vllm) for _ in range(args.rounds))
        print(f"\nvLLM's own server until it answers: {alone:.2f} s")


if __name__ == "__main__":
    main()
