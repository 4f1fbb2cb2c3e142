"""Runs of `grpocli train` for experiments, in another process or in this one, and what their files say."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiment import Setting
from forks import forked

TIMES = ("time/", "memory/", "engine/", "sync/seconds", "sync/bytes")
"""Prefixes of metrics that differ between two equal runs."""
SHORT = ("model.warm_start_steps=20", "eval.problems=4")
"""The built-in model on a CPU."""
TAIL = 1500  # characters of a failed command's output


def train(setting: Setting, name: str, *keys: str) -> Path:
    """The folder of a finished run in a fork. Raises RuntimeError with the end of its output if it fails."""
    output(lambda: train_here(setting, name, *keys))
    return setting.folder / name


def train_here(setting: Setting, name: str, *keys: str) -> Path:
    """The same in this process, whose functions an experiment may have replaced."""
    from grpocli.cli import main

    folder = setting.folder / name
    with suppress(SystemExit):
        main(["train", *keys, f"hardware.device={setting.device}", f"hydra.run.dir={folder}"])
    file = folder / "summary.json"
    ended = json.loads(file.read_text())["exit"] if file.exists() else "before its first step"
    if ended != "done":
        raise RuntimeError(f"the run ended: {ended}")
    return folder


def output(call: Callable[[], object], allowed: Sequence[int] = (0,)) -> str:
    """What a call prints in a fork. Raises RuntimeError with the end of it for other exit codes."""
    code, out, err = forked(call)
    if code not in allowed:
        raise RuntimeError(f"exit code {code}: {(out + err)[-TAIL:]}")
    return out


def metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.mean(row[key] for row in rows if key in row))


def median(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows if key in row))


def apart(one: float, other: float) -> float:
    """The relative difference of two positive numbers."""
    return abs(one / other - 1)


def differences(one: Path, other: Path) -> dict[str, Any]:
    """How far two runs are apart: whether metrics are equal, and the largest difference of weights."""
    from safetensors.torch import load_file

    rows, others = (
        [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in metrics(folder)]
        for folder in (one, other)
    )
    weights, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    apart = [float((weights[name].double() - theirs[name].double()).abs().max()) for name in weights]
    names = sorted({k for a, b in zip(rows, others, strict=False) for k in a.keys() | b.keys() if a.get(k) != b.get(k)})
    return {"metrics": names, "weights": max(apart)}


def model_keys(setting: Setting) -> list[str]:
    """The task of serving experiments: the pretrained model on its recipe if there is one, else the built-in model."""
    keys = ["eval.problems=0", "checkpoint.every=0"]
    if setting.model:
        return [*keys, "recipe=multiplication", f"model.path={setting.model}"]
    return [*keys, "rollout.prompts_per_step=8", "rollout.group_size=8"]
