"""Runs of `grpocli train` for experiments, in another process or in this one, and what their files say."""

from __future__ import annotations

import importlib
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
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


def command(setting: Setting, folder: Path, *keys: str) -> list[str]:
    options = [*keys, f"hardware.device={setting.device}", f"hydra.run.dir={folder}"]
    return [sys.executable, "-m", "grpocli", "train", *options]


def train(setting: Setting, name: str, *keys: str) -> Path:
    """The folder of a finished run. Raises RuntimeError with the end of its output if it fails."""
    folder = fresh(setting, name)
    output(command(setting, folder, *keys))
    return folder


def train_here(setting: Setting, name: str, *keys: str) -> Path:
    """The same in this process, whose functions an experiment may have replaced."""
    from grpocli.cli import main

    folder = fresh(setting, name)
    with suppress(SystemExit):
        main(command(setting, folder, *keys)[3:])
    file = folder / "summary.json"
    ended = json.loads(file.read_text())["exit"] if file.exists() else "before its first step"
    if ended != "done":
        raise RuntimeError(f"the run ended: {ended}")
    return folder


def output(command: Sequence[str], allowed: Sequence[int] = (0,)) -> str:
    """What a command of grpocli prints, in a fork. Raises RuntimeError with the end of it for other exit codes."""
    from grpocli.cli import main

    code, out, err = forked(lambda: main(list(command[3:])))
    if code not in allowed:
        raise RuntimeError(f"exit code {code}: {(out + err)[-TAIL:]}")
    return out


def side(script: str, name: str, folder: Path, steps: int, *keys: str) -> dict[str, Any]:
    """What a side of bench/side_by_side (`grpocli_side`, `trl_side`) prints for a workload, in a fork."""

    code, out, err = forked(lambda: side_here(name, folder, steps, *keys, script=script))
    if code:
        raise RuntimeError(f"{script} {name}: exit code {code}: {err[-TAIL:]}")
    return dict(json.loads(out.splitlines()[-1]))


def side_here(name: str, folder: Path, steps: int, *keys: str, script: str = "grpocli_side") -> None:
    """The same in this process, whose functions an experiment may have replaced."""
    if script == "trl_side":
        sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL would import parts of it that are not carried
    sys.argv = [f"{script}.py", name, str(folder), str(steps), *keys]
    importlib.import_module(script).main()


def fresh(setting: Setting, name: str) -> Path:
    """A folder of an experiment that does not exist."""
    folder = Path(setting.folder) / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


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
