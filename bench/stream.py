"""Seconds a step of a stream of rollouts over their bound: `python bench/stream.py --staleness 2 [KEY=VALUE ...]`.

Trains the built-in model with two servers and an objective that sleep (`bench/paced.py`). Completions have log-normal
lengths, and an update takes as long as sampling with all slots. The bound is max(tokens / capacity, training). Prints a
line of JSON: the mean step without the first max_staleness + 1, its ratio to the bound, and that of
`grpocli plan --simulate` for the same lengths, without and with `own`: what update and sync take beside the sleep.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from simulated import COMMON, GRPOCLI, ONE_THREAD, PACED, SLEEPING, paced_server

from grpocli.rollout.sampling import derive_seed
from grpocli.rollout.vllm.client import spread_seed
from grpocli_tools.plan.simulate import Job, LogNormal, Speeds, simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP, SERVERS, SLOTS = 8, 2, 64
MEAN, LONGEST = 300.0, 8192
FIRST, EACH = 0.01, 0.0001  # seconds for a token, and for each running sequence; scaled to the bound


@dataclass(frozen=True)
class Requested(LogNormal):
    """The lengths that the servers draw for the groups of a run, in order, whatever the simulation's seed."""

    numbers: Iterator[int] = field(default_factory=itertools.count)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = []
        for number in itertools.islice(self.numbers, count // GROUP):
            server = np.random.default_rng(spread_seed(derive_seed(0, number)))
            random.bit_generator.state = server.bit_generator.state  # which decides then whether the group is kept
            drawn.append(LogNormal.draw(self, random, GROUP))
        return np.concatenate(drawn)


def job_of(args: argparse.Namespace) -> Job:
    """The simulated run: an update takes `args.bound` seconds, and so do a step's tokens at full capacity."""
    lengths = LogNormal.with_mean(MEAN, math.sqrt(math.expm1(args.sigma**2)), LONGEST)
    tokens = args.prompts * GROUP * lengths.mean / args.kept
    scale = args.bound * SERVERS * SLOTS / (tokens * (FIRST + EACH * SLOTS))
    return Job(
        *(args.prompts, GROUP, 0.0),
        lengths=Requested(lengths.typical, lengths.spread, lengths.longest),
        speeds=Speeds([0.0, *(scale * (FIRST + EACH * n) for n in range(1, SLOTS + 1))], update=args.bound),
        servers=SERVERS,
        slots=SLOTS,
        trainers=1,
        rollout_devices=SERVERS,
        max_staleness=args.staleness,
        in_flight=True,
        in_order=False,
        kept=args.kept,
        rounds=10 if args.kept < 1 else 1,
    )


def measured(args: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    decode = job_of(args).speeds.decode
    options = [
        *(f"--slots={SLOTS}", f"--first={2 * decode[1] - decode[2]}", f"--each={decode[2] - decode[1]}"),
        *(f"--mean={MEAN}", f"--sigma={args.sigma}", f"--longest={LONGEST}", f"--kept={args.kept}", "--per-token=512"),
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        urls = [running.enter_context(paced_server(*options)) for _ in range(SERVERS)]
        overrides = [
            *(*COMMON, *SLEEPING, f"engine.base_url=[{','.join(urls)}]"),
            *(f"rollout.prompts_per_step={args.prompts}", f"rollout.group_size={GROUP}", f"train.steps={args.steps}"),
            *(f"rollout.max_staleness={args.staleness}", f"algorithm.objective.seconds={args.bound}"),
            *(["algorithm/keep=dynamic"] if args.kept < 1 else []),
            *(f"reward.python.function={PACED}:parity", f"hydra.run.dir={folder}/run", *args.overrides),
        ]
        env = {**os.environ, **ONE_THREAD}
        subprocess.run([GRPOCLI, "train", *overrides], check=True, stdout=subprocess.DEVNULL, env=env)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--staleness", type=int, default=1, help="rollout.max_staleness (1)")
    cli.add_argument("--prompts", type=int, default=64, help="rollout.prompts_per_step (64)")
    cli.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of lengths (1.0)")
    cli.add_argument("--kept", type=float, default=1.0, help="share of groups that dynamic sampling keeps (1.0: all)")
    cli.add_argument("--bound", type=float, default=4.0, help="seconds of a step that waits for nothing (4.0)")
    cli.add_argument("--steps", type=int, default=20)
    cli.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="not simulated, such as rollout.order=request")
    args = cli.parse_args()
    rows = measured(args)[args.staleness + 1 :]
    seconds, training, sync = (fmean(row[f"time/{part}"] for row in rows) for part in ("step", "train", "sync"))
    job = job_of(args)
    slower = replace(job_of(args), speeds=replace(job.speeds, update=training, sync=sync))
    found = {
        **vars(args) | {"steps": len(rows), "seconds": seconds, "ratio": seconds / args.bound},
        "simulated": simulate(job, args.steps).step_seconds / args.bound,
        "simulated_with_own": simulate(slower, args.steps).step_seconds / args.bound,
        **{"trainer_idle": 1 - training / seconds, "own": training - args.bound + sync},
    }
    print(json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in found.items()}))


if __name__ == "__main__":
    main()
