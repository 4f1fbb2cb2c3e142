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
from grpocli_tools.doctor.config import CheckedConfig, runs_in
from grpocli_tools.doctor.machine import GIB, Ended, Finding, Machine, Needs, Package, examine

SMALL = {
    "fits": True,
    "model": {"trained": 10**6, "parameters": 10**6},
    "step": {"seconds": {"generation": 3.0}},
    "devices": [{"peak": GIB, "memory": 8 * GIB, "name": "GPU"}],
}
OWN = Package("grpocli", "0.1.0")
VLLM, QWEN, ZERO = "engine=vllm", "model=qwen2.5-1.5b", "hardware.parallel=zero3"


def checked(*words: str, runs: Path | None = None) -> CheckedConfig:
    chosen = [word for word in words if not word.startswith("hydra")]
    return CheckedConfig(build_run(composed(chosen, None)), words, runs)


def planned(**plan: Any) -> dict[str, Ended]:
    return {"grpocli plan": Ended(0, json.dumps({**SMALL, **plan}))}


def findings(config: CheckedConfig, here: Machine) -> dict[str, Finding]:
    groups = examine(config.checks(), here, config.needs(), unreported)
    return by_name(one for group in groups for one in group.findings)


FULL = [{"peak": 9 * GIB, "memory": 8 * GIB, "name": "cuda:0"}]
LARGE = {"trained": 10**9, "parameters": 10**9}
CRASH = {"probes.py torch": said(code=1, err="ImportError: libcudart.so.13\n"), "grpocli plan": Ended(1, "", "x")}
# overrides, answers of the machine: the line's name and status, a part of its detail, and its advice
LINES: list[tuple[list[str], dict[str, Ended], tuple[str, str, str, str]]] = [
    (["train.steps=3"], planned(), ("model", "ok", "no file or package is missing", "")),
    (["train.steps=3"], planned(), ("plan", "ok", "needs 1.0 of 8.0 GiB on GPU", "")),
    (["train.steps=3"], planned(), ("devices", "ok", "no GPU; the run computes on the CPU", "")),
    (["tracker=trackio"], planned(), ("tracker", "ok", "", "")),
    (["task=jsonl", "task.path=no.jsonl"], planned(), ("data", "error", "task.path=no.jsonl", "")),
    (["model=hf", "model.path=./nowhere"], planned(), ("model", "error", "model.path=./nowhere", "")),
    (
        [QWEN, "reward=[math]", "hydra.run.dir=x"],
        planned(fits=False, devices=FULL),
        (
            "plan",
            "error",
            "needs 9.0 of 8.0 GiB on cuda:0",
            "grpocli plan model=qwen2.5-1.5b 'reward=[math]' ",
        ),
    ),
    (
        ["seed=1"],
        {"grpocli plan": Ended(None)},
        ("plan", "warning", "no estimate: it did not end", "grpocli plan seed=1"),
    ),
    (
        ["seed=1"],
        {"grpocli plan": Ended(2, "", "grpocli: error: x=y: z")},
        ("plan", "warning", "no estimate: x=y: z", ""),
    ),
    (
        ["seed=1"],
        planned(step={"seconds": {"generation": 7000.0, "update": 3800.0}}),
        ("devices", "warning", "takes the CPU about 3 hours", "GPUs"),
    ),
    (["seed=1"], planned(fits=False), ("devices", "error", "the CPU's memory does not hold the run", "GPUs")),
    ([QWEN], {"grpocli plan": Ended(None)}, ("devices", "warning", "no estimate", "GPUs")),
    (["hardware.device=cuda"], planned(), ("devices", "error", "there is no GPU", "hardware.device=cpu")),
    (["hydra/launcher=slurm"], planned(), ("devices", "-", "those of the cluster's nodes", "")),
    (
        ["train.steps=60"],
        planned(model=LARGE),
        ("checkpoints", "error", "10.0 GiB free, and", "hydra.run.dir="),
    ),
    ([VLLM], planned(), ("sync", "ok", "weights reach vLLM by shm", "")),
    ([VLLM, "sync=ipc"], planned(), ("sync", "error", "", "sync=shm")),
    ([VLLM, "sync=nccl"], planned(), ("sync", "error", "", "sync=shm")),
    ([VLLM, "hardware.processes=2"], CRASH, ("devices", "ok", "", "")),
    ([VLLM, "hardware.processes=2"], CRASH, ("plan", "warning", "no estimate: x", "")),
]


@pytest.mark.parametrize(("words", "answers", "line"), LINES, ids=str)
def test_a_config_gets_a_line_of_each_check(
    words: list[str], answers: dict[str, Ended], line: tuple[str, str, str, str], tmp_path: Path
) -> None:
    name, status, detail, advice = line
    free = 10 * GIB if name == "checkpoints" else 100 * GIB
    config = checked(*words, runs=tmp_path / "other")
    found = findings(config, machine(tmp_path, answers=answers, free=free))[name]
    assert (found.status, detail in found.detail, advice in found.advice) == (status, True, True), found
    assert bool(found.advice) == (status in ("warning", "error"))


def test_a_package_that_a_choice_needs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpocli.models.lora.find_spec", lambda name: None)
    found = findings(checked("model.lora.rank=4"), machine(tmp_path, answers=planned()))["model"]
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


def command(monkeypatch: pytest.MonkeyPatch, here: Machine, *words: str) -> int:
    """The exit code of `grpocli doctor` on a machine."""
    monkeypatch.setattr("grpocli_tools.doctor.machine.Machine", lambda: here)
    return run_here("doctor", *words)


def test_exit_code_0_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, machine(tmp_path, packages=[OWN])) == 0
    assert "Ready for the default run: no errors" in capsys.readouterr().out


def test_exit_code_1_with_an_error_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = machine(tmp_path, packages=[OWN], answers=CRASH | planned())
    assert command(monkeypatch, here, "--json", "recipe=dapo-qwen2.5-32b") == 1
    lines: Sequence[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(set(line) == {"name", "status", "detail", "advice"} for line in lines)
    assert [line["advice"] for line in lines if line["status"] in ("warning", "error") and not line["advice"]] == []
    status = {line["name"]: line["status"] for line in lines}
    assert (status["torch"], status["GPUs"], status["plan"]) == ("error", "-", "ok")


def test_text_ends_with_the_number_of_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = machine(tmp_path, packages=[OWN], answers={"probes.py torch": said(*TORCH[:1], code=-11)}, free=0)
    assert command(monkeypatch, here) == 1
    out = capsys.readouterr().out
    assert "-> export GRPOCLI_CACHE=FOLDER on another disk" in " ".join(out.split())
    assert "Not ready for the default run: " in out


@pytest.mark.parametrize(
    ("words", "said_by_it"),
    [
        (["train.stepps=3"], 'there is no key train.stepps; did you mean "train.steps"?'),
        (["--jsn"], "--jsn"),
        (["engine=transformers", ZERO], f"{ZERO}: engine=transformers cannot sample"),
    ],
)
def test_exit_code_2_and_one_sentence_for_wrong_usage(
    words: list[str], said_by_it: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("doctor", *words) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.strip().splitlines())) == ("", 1)
    assert said_by_it in printed.err
