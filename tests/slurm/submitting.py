"""Submits runs to the tests' cluster and reads their results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm.cluster import Cluster

GRPOCLI = [sys.executable, "-m", "grpocli"]
STAND_IN = Path(__file__).with_name("stand_in.py")
MULTIRUN = ["train", "-m", "hydra/launcher=slurm"]


def written(sweep: Path, orders: dict[str, Any], *overrides: str) -> Path:
    """A batch script for the stand-in; `orders` change its behaviour."""
    python = f"hydra.launcher.python={STAND_IN}"
    command = [*GRPOCLI, *MULTIRUN, "hydra.launcher.dry_run=true", python, f"hydra.sweep.dir={sweep}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for folder in [path.parent for path in sweep.glob("*/config.yaml")]:
        (folder / "orders.json").write_text(json.dumps(orders))
    return sweep / "job.sh"


class Submitted:
    """A job of the cluster."""

    def __init__(self, cluster: Cluster, number: str, run: Path) -> None:
        self.cluster, self.number, self.run = cluster, number, run

    @classmethod
    def of(cls, cluster: Cluster, script: Path, *options: str) -> Submitted:
        done = cluster.run("sbatch", "--parsable", *options, str(script))
        assert done.returncode == 0, done.stderr
        return cls(cluster, done.stdout.strip(), script.parent / "0")

    @property
    def log(self) -> str:
        path = self.run.parent / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def shown(self, key: str) -> str:
        """A field of `scontrol show job`."""
        text = self.cluster.run("scontrol", "show", "job", self.number, "--oneliner").stdout
        found = re.search(rf"\b{key}=(\S*)", text)
        return found[1] if found else ""

    def until(self, ready: Callable[[], object], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            said = f"{what} not within {seconds:.0f} s; job is {self.shown('JobState')}; log:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def until_over(self, *expected: str, seconds: float = 60) -> None:
        self.until(lambda: self.shown("JobState") in expected, " or ".join(expected), seconds)

    def until_step(self, number: int) -> None:
        """Wait until the stand-in has done a step."""
        self.until(lambda: self.step() >= number, f"step {number}")

    def step(self) -> int:
        path = self.run / "step"
        return int(path.read_text() or 0) if path.exists() else 0

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.run / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def detached(cluster: Cluster, sweep: Path, *overrides: str) -> Submitted:
    """Submit a job of one run without waiting for it."""
    done = cluster.run(*GRPOCLI, *MULTIRUN, "hydra.launcher.wait=false", f"hydra.sweep.dir={sweep}", *overrides)
    assert done.returncode == 0, done.stderr
    found = re.search(r"submitted job (\d+)", done.stdout)
    assert found, done.stdout
    return Submitted(cluster, found[1], sweep / "0")


def wait_for_step(job: Submitted, step: int, seconds: float = 120) -> None:
    """Wait until a run has logged a step."""
    path = job.run / "metrics.jsonl"
    job.until(lambda: path.exists() and len(path.read_text().splitlines()) >= step, f"step {step}", seconds)
