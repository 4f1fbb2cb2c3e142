"""Runs grpocli in this process or another one, and reads the files of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grpocli.cli import main

SMALL = ["model.warm_start_steps=20", "rollout.prompts_per_step=4", "rollout.group_size=4", "train.steps=3"]
SMALL += ["eval.problems=4", "eval.samples=2"]
EVEN = ["reward=[format]", "reward.format.pattern='.*[02468]'"]
"""Rewards about half of all answers, so that every step has something to learn."""


def run_here(*argv: str) -> int:
    """Run a command in this process. Returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


def start(*argv: str, **variables: str) -> subprocess.Popen[str]:
    """Start a command in another process, with these variables beside its own."""
    command = [sys.executable, "-m", "grpocli", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 300, code: int | None = None) -> tuple[int, str]:
    """Wait for a process. Returns its exit code, asserted to be `code`, and output without a library's progress bar.

    A process that does not end is killed.
    """
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"it took longer than {timeout} s:\n{out}") from None
    assert not re.search(r"\d%\||it/s\]", out), out
    assert code in (None, process.returncode), out
    return process.returncode, out


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)


def wait_for(path: Path, seconds: float = 180) -> None:
    until(path.exists, seconds)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "stream/"))} for row in rows]


def killed_after(step: int, run: Path, copy: Path) -> Path:
    """A copy of a finished run in the state after a kill at a step."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    (copy / "summary.json").unlink()
    for path in [*(copy / "checkpoints").iterdir(), *(copy / "rollouts").iterdir()]:
        if int(path.stem.removeprefix("step_")) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return copy


def assert_close_metrics(run: list[dict[str, Any]], other: list[dict[str, Any]], rel: float = 1e-5) -> None:
    for one, two in zip(run, other, strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy", "tokens/trained", "completions/mean_length"):
            assert one[name] == pytest.approx(two[name], rel=rel, abs=rel / 100), name


def assert_same_run(run: Path, other: Path, *files: str) -> None:
    """Asserts equal metrics and, to the bit, equal final weights and tensors of other files."""
    assert without_times(metrics(run)) == without_times(metrics(other))
    for file in ("model/model.safetensors", *files):
        one, two = (load_file(folder / file) for folder in (run, other))
        assert one.keys() == two.keys(), file
        assert all(one[name].equal(two[name]) for name in one), file


def assert_resumes_exactly(run: Path, step: int, copy: Path, *options: str, files: Sequence[str] = ()) -> None:
    """Asserts that a copy of the run that was killed at a step, and is resumed, equals the run."""
    killed_after(step, run, copy)
    assert run_here("train", f"resume={copy}", *options) == 0
    assert_same_run(copy, run, *files)
