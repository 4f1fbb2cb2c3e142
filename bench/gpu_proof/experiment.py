"""Experiments of the GPU proof, what is expected of them, and the file of their results.

The file is JSON:

    {"schema": 1, "experiments": {NAME: RESULT, ...}}

A result has

    verdict    "as expected", "not as expected", "failed" (it raised, crashed or hung), or "not run"
    reason     one sentence for the last two, and on a CPU if no law is about it; "" otherwise
    measured   {figure: a number, a text or a list}
    laws       [{"figure", "text", "low", "high", "measured", "holds"}]; low or high is null if there is no limit, and
               holds is null for a law that says nothing about this device or without its figure
    size       "full" on a GPU, "small" on a CPU
    machine    {"device", "driver", "torch", ... , "commit"}, see `machine.py`
    seconds    of the experiment; when: its end, in UTC
    log        the last lines of its output, if it failed
    struck     {figure: why it says nothing, e.g. a time taken beside other experiments}; may be absent

The file is replaced as a whole after each experiment, so an experiment that was cut short is absent from it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 1
EXPECTED, UNEXPECTED, FAILED, NOT_RUN = "as expected", "not as expected", "failed", "not run"
KINDS: dict[str, type] = {
    **dict.fromkeys(("verdict", "reason", "size", "when", "log"), str),
    **{"measured": dict, "laws": list, "machine": dict},
}
NEEDS = {
    "gpu": "needs a GPU",
    "two gpus": "needs two GPUs",
    "vllm": "needs vLLM",
    "trl": "needs TRL",
    "model": "needs the folder of a pretrained model (--model)",
}
"""What an experiment may need, and the reason for which it does not run without it."""
STAGES = {
    "machine": "the machine, and the settings that grpocli makes",
    "kernels": "attention, the output head and the layouts, without a training run",
    "transfers": "what weight syncs rest on, without a server",
    "updates": "updates of models of 0.5B and 1.5B parameters with random weights",
    "runs": "whole runs with engine=transformers",
    "serving": "whole runs with a vLLM server",
    "colocated": "whole runs with vLLM in the trainer's process",
    "graphs": "compiled vLLM: CUDA graphs, many sequences, repeated runs",
    "peer": "beside TRL",
}
"""By value: first what is cheap and decides most."""

FIGURES = "figures.json"
"""In an experiment's folder: what it has saved."""
CPU_TIMES = 3  # as long may an experiment take on a CPU, where others may compute, too

Measured = dict[str, Any]


@dataclass(frozen=True)
class Law:
    """An expectation: a figure lies between `low` and `high`, both included. gpu: it says nothing about a CPU."""

    figure: str
    text: str
    low: float = -math.inf
    high: float = math.inf
    gpu: bool = False

    @property
    def range(self) -> str:
        """`at most 5`, `0.15 to 0.35`, `yes`."""
        if self.low == self.high:
            return "yes" if self.low is True else f"{self.low:g}"
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high == math.inf else f"{self.low:g} to {self.high:g}"

    def check(self, measured: Measured, device: str) -> dict[str, Any]:
        """The entry of the result's `laws`."""
        value = measured.get(self.figure)
        checked = device == "cuda" or not self.gpu
        return {
            "figure": self.figure,
            "text": self.text,
            "low": limit(self.low),
            "high": limit(self.high),
            "measured": value,
            "holds": self.low <= value <= self.high if checked and isinstance(value, int | float) else None,
        }


def limit(value: float) -> float | None:
    return None if math.isinf(value) else value


def at_most(figure: str, high: float, text: str, gpu: bool = False) -> Law:
    return Law(figure, text, high=high, gpu=gpu)


def at_least(figure: str, low: float, text: str, gpu: bool = False) -> Law:
    return Law(figure, text, low=low, gpu=gpu)


def between(figure: str, low: float, high: float, text: str, gpu: bool = False) -> Law:
    return Law(figure, text, low, high, gpu)


def true(figure: str, text: str, gpu: bool = False) -> Law:
    return Law(figure, text, True, True, gpu)


@dataclass(frozen=True)
class Setting:
    """Where an experiment runs. device: "cuda" or "cpu". model: a folder with a pretrained model. folder: for files."""

    device: str
    model: str | None
    folder: Path

    @property
    def small(self) -> bool:
        """Whether sizes are those of a test on a CPU."""
        return self.device == "cpu"

    def save(self, figures: Measured) -> None:
        """Keep the figures that an experiment has so far: those of its result if it fails later."""
        write(self.folder / FIGURES, figures)


@dataclass(frozen=True)
class Experiment:
    """name: of its function. needs: of `NEEDS`. seconds: after which it counts as hung on a GPU."""

    name: str
    stage: str
    question: str
    laws: tuple[Law, ...]
    run: Callable[[Setting], Measured]
    needs: tuple[str, ...]
    seconds: float

    def limit(self, device: str) -> float:
        """Seconds after which it counts as hung."""
        return self.seconds if device == "cuda" else CPU_TIMES * self.seconds

    def missing(self, has: dict[str, bool]) -> str:
        """The reason why it cannot run on a machine that has this; "" if it can."""
        return next((NEEDS[need] for need in self.needs if not has.get(need)), "")


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    stage: str, question: str, *laws: Law, needs: tuple[str, ...] = (), seconds: float = 60
) -> Callable[[Callable[[Setting], Measured]], Callable[[Setting], Measured]]:
    """Register a function as an experiment of a stage. It returns its figures; `laws` check them."""

    def register(function: Callable[[Setting], Measured]) -> Callable[[Setting], Measured]:
        name = function.__name__
        assert {stage, *needs} <= {*STAGES, *NEEDS}, (stage, needs)
        EXPERIMENTS[name] = Experiment(name, stage, question, laws, function, needs, seconds)
        return function

    return register


def in_order() -> list[Experiment]:
    """All experiments, stage by stage."""
    return [one for stage in STAGES for one in EXPERIMENTS.values() if one.stage == stage]


def checked(one: Experiment, measured: Measured, device: str) -> tuple[str, list[dict[str, Any]]]:
    """The verdict on an experiment that has run, and its laws."""
    laws = [law.check(measured, device) for law in one.laws]
    # on a GPU a law without its figure does not hold: the experiment did not see what it was for
    broken = [law for law in laws if law["holds"] is False or (device == "cuda" and law["holds"] is None)]
    return (UNEXPECTED if broken else EXPECTED), laws


def outcome(verdict: str, **given: Any) -> dict[str, Any]:
    """What an experiment says of a result. given: its reason, measured, laws and log, as far as there are any."""
    result: dict[str, Any] = {"verdict": verdict, "reason": "", "measured": {}, "laws": [], "log": "", **given}
    for name, value in result["measured"].items():
        if isinstance(value, float) and not math.isfinite(value):  # which JSON lacks; no law holds for such a text
            result["measured"][name] = str(value)
    return result


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace a file of JSON as a whole."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file. Raises SystemExit if they do not have the form above: it may come from elsewhere."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        experiments: dict[str, dict[str, Any]] = found["experiments"]
        wrong = [name for name, result in experiments.items() if not _is_result(result)]
        if found["schema"] == SCHEMA and not wrong:
            return experiments
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        wrong = [str(error)]
    reason = ", ".join(wrong) or f"not schema {SCHEMA}"
    raise SystemExit(f"{path} is damaged or of another version ({reason}): move it away")


def _is_result(result: dict[str, Any]) -> bool:
    return (
        all(isinstance(result[key], kind) for key, kind in KINDS.items())
        and (result["verdict"] in (EXPECTED, UNEXPECTED, FAILED, NOT_RUN) and result["size"] in ("full", "small"))
        and all(isinstance(value, str) for value in result["machine"].values())
        and all(isinstance(law["figure"], str) for law in result["laws"])
    )


class Results:
    """The results of a file, by the experiment's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.experiments = _read(path) if path.exists() else {}

    def has(self, name: str) -> bool:
        """Whether an experiment needs no further run. One that could not run may be able to now."""
        return name in self.experiments and self.experiments[name]["verdict"] != NOT_RUN

    def put(self, name: str, machine: dict[str, Any], device: str, seconds: float, found: dict[str, Any]) -> None:
        """Add what `outcome` made, and replace the file."""
        size, when = "small" if device == "cpu" else "full", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.experiments[name] = found | {"machine": machine, "size": size, "seconds": round(seconds, 1), "when": when}
        self.save()

    def save(self) -> None:
        write(self.path, {"schema": SCHEMA, "experiments": self.experiments})
