"""Running grpocli in processes of its own, and reading what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL = [
    "model.warm_start_steps=20",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "train.steps=3",
    "eval.problems=4",
    "eval.samples=2",
]


def start(*argv: str) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    command = [sys.executable, "-m", "grpocli", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str]:
    """Its exit code and output. One that does not end is killed, or the next test would be told of it."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"it took longer than {timeout} s:\n{out}") from None
    return process.returncode, out


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
