"""`grpocli doctor OVERRIDES`: what a config needs of a machine, and what the command prints and returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli.running import run_here
from doctor.machines import TORCH, by_name, machine, said
from huggingface_hub import constants

from grpocli.composition.compose import build_run
from grpocli.progress import unreported
from grpocli_tools.command_line import composed
from grpocli_tools.doctor.doctor_command import CheckedConfig, runs_in
from grpocli_tools.doctor.machine import Ended, Finding, Machine, Needs, Package, examine

OWN = Package("grpocli", "0.1.0")
VLLM, QWEN = "engine=vllm", "model=qwen2.5-1.5b"


def checked(*words: str, runs: Path | None = None) -> CheckedConfig:
    chosen = [word for word in words if not word.startswith("hydra")]
    return CheckedConfig(build_run(composed(chosen, None)), words, runs)


def findings(config: CheckedConfig, here: Machine) -> dict[str, Finding]:
    groups = examine(config.checks(), here, config.needs(), unreported)
    return by_name(one for group in groups for one in group.findings)


CRASH = {"probes.py torch": said(code=1, err="ImportError: libcudart.so.13\n")}
GPUS = {"probes.py torch": said(*TORCH[:2], {"gpus": [{"name": "H100"}] * 2}, TORCH[3])}
# overrides, answers of the machine: the line's name and status, a part of its detail, and its advice
LINES: list[tuple[list[str], dict[str, Ended], tuple[str, str, str, str]]] = [
    (["train.steps=3"], {}, ("model", "ok", "no file or package is missing", "")),
    (["train.steps=3"], {}, ("devices", "ok", "no GPU; the run computes on the CPU", "")),
    (["tracker=trackio"], {}, ("tracker", "ok", "", "")),
    (["task=jsonl", "task.path=no.jsonl"], {}, ("data", "error", "task.path=no.jsonl", "")),
    (["model=hf", "model.path=./nowhere"], {}, ("model", "error", "model.path=./nowhere", "")),
    (["hardware.device=cuda"], {}, ("devices", "error", "there is no GPU", "hardware.device=cpu")),
    (["hardware.processes=3", "engine=transformers"], GPUS, ("devices", "error", "hardware.processes=3", "")),
    (["hydra/launcher=slurm"], {}, ("devices", "-", "those of the cluster's nodes", "")),
]


@pytest.mark.parametrize(("words", "answers", "line"), LINES, ids=str)
def test_a_config_gets_a_line_of_each_check(
    words: list[str], answers: dict[str, Ended], line: tuple[str, str, str, str], tmp_path: Path
) -> None:
    name, status, detail, advice = line
    found = findings(checked(*words), machine(tmp_path, answers=answers))[name]
    assert (found.status, detail in found.detail, advice in found.advice) == (status, True, True), found
    assert bool(found.advice) == (status in ("warning", "error"))


def test_a_package_that_a_choice_needs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpocli.models.lora.find_spec", lambda name: None)
    found = findings(checked("model.lora.rank=4"), machine(tmp_path))["model"]
    assert (found.status, "peft" in found.detail) == ("error", True)


def test_the_runs_folder_is_that_of_the_overrides(tmp_path: Path) -> None:
    assert runs_in(["hydra.run.dir=runs/first"], tmp_path) == tmp_path / "runs" / "first"
    assert runs_in(["hydra.run.dir='/big/${now:%H}/x'"], tmp_path) == Path("/big")
    assert runs_in(["train.steps=3"], tmp_path) is None


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([VLLM], Needs(vllm=VLLM)),
        ([VLLM, "engine.base_url=http://127.0.0.1:8000"], Needs()),
        (["task=mbpp", "reward=[code]"], Needs(sandbox="reward=[code]", hub="task.path=google-research-datasets/mbpp")),
        (["hydra/launcher=slurm", "hardware.device=cuda", VLLM], Needs(slurm="hydra/launcher=slurm")),
        (["task=gsm8k", "reward=[math]"], Needs(hub="task.path=openai/gsm8k")),
        ([QWEN, "task=gsm8k"], Needs(hub="model.path=Qwen/Qwen2.5-1.5B-Instruct, task.path=openai/gsm8k")),
    ],
)
def test_what_a_config_needs(words: list[str], wanted: Needs) -> None:
    assert checked(*words).needs() == wanted


def test_what_is_in_the_cache_does_not_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", tmp_path / "hub")
    (tmp_path / "datasets" / "open-r1___dapo-math-17k-processed").mkdir(parents=True)
    (tmp_path / "hub" / "models--Qwen--Qwen2.5-1.5B-Instruct").mkdir(parents=True)
    assert checked(QWEN, "task=dapo-math-17k").needs().hub == ""


def test_the_exit_code_is_1_with_an_error_and_json_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("grpocli_tools.doctor.machine.Machine", lambda: machine(tmp_path, packages=[OWN]))
    assert run_here("doctor") == 0
    assert "Ready for the default run: no errors" in capsys.readouterr().out
    broken = machine(tmp_path, packages=[OWN], answers=CRASH)
    monkeypatch.setattr("grpocli_tools.doctor.machine.Machine", lambda: broken)
    assert run_here("doctor", "--json", "recipe=dapo-qwen2.5-32b") == 1
    lines: Sequence[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(set(line) == {"name", "status", "detail", "advice"} for line in lines)
    assert [line["advice"] for line in lines if line["status"] in ("warning", "error") and not line["advice"]] == []
    status = {line["name"]: line["status"] for line in lines}
    assert (status["torch"], status["GPUs"]) == ("error", "-")
