"""`grpocli doctor OVERRIDES`: what a config needs of a machine, and what the command prints and returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli.running import run_here
from doctor.machines import TORCH, by_name, machine, said

from grpocli.composition.compose import build_run
from grpocli.errors import ConfigError
from grpocli.progress import unreported
from grpocli_tools.command_line import composed
from grpocli_tools.doctor import engines, surroundings
from grpocli_tools.doctor.checkup import Finding, examine
from grpocli_tools.doctor.config import CheckedConfig, runs_in
from grpocli_tools.doctor.machine import Ended, Machine, Package
from grpocli_tools.doctor.needs import GIB

SMALL = {"fits": True, "model": {"trained": 10**6, "parameters": 10**6}, "step": {"seconds": {"generation": 3.0}}}
PLAN = {"grpocli plan": Ended(0, json.dumps({**SMALL, "devices": [{"peak": GIB, "memory": 8 * GIB, "name": "GPU"}]}))}
OWN = Package("grpocli", "0.1.0")


def checked(
    *words: str, ready: Mapping[str, Callable[[], None]] = {}, slurm: bool = False, runs: Path | None = None
) -> CheckedConfig:
    return CheckedConfig(build_run(composed(list(words), None)), words, ready, slurm, runs)


def findings(config: CheckedConfig, here: Machine) -> dict[str, Finding]:
    groups = examine(config.checks(), here, config.needs(here), unreported)
    return by_name(one for group in groups for one in group.findings)


def test_a_config_that_fits_is_ok(tmp_path: Path) -> None:
    found = findings(checked("train.steps=3", ready={"tracker": lambda: None}), machine(tmp_path, answers=PLAN))
    assert {name: (one.status, one.advice) for name, one in found.items()} == {
        name: ("ok", "") for name in ("tracker", "devices", "plan", "checkpoints")
    }


def test_progress_names_what_is_waited_for_without_a_share_of_the_time(tmp_path: Path) -> None:
    said: list[tuple[float, str]] = []
    config, here = checked("train.steps=3"), machine(tmp_path, answers=PLAN)
    examine(config.checks(), here, config.needs(here), lambda done, total, unit, detail="": said.append((total, unit)))
    assert said[0] == (0, "0 of 4 checks")
    assert {total for total, _ in said} == {0}


def test_an_error_of_the_config_is_a_line_with_its_hint_or_a_key_to_type(tmp_path: Path) -> None:
    def no_wandb() -> None:
        raise ConfigError("needs wandb", key="tracker", value="wandb", hint="pip install wandb")

    def no_model() -> None:
        raise ConfigError("there is no such folder", key="model.path", value="x")

    here = machine(tmp_path, answers=PLAN)
    found = findings(checked("train.steps=3", ready={"tracker": no_wandb, "model": no_model}), here)
    assert found["tracker"] == Finding("tracker", "error", "tracker=wandb: needs wandb", "pip install wandb")
    assert (found["model"].status, "model.path=FOLDER" in found["model"].advice) == ("error", True)


def test_a_config_that_does_not_fit_names_the_plan(tmp_path: Path) -> None:
    plan = {**SMALL, "fits": False, "devices": [{"peak": 9 * GIB, "memory": 8 * GIB, "name": "cuda:0"}]}
    words = ("model=qwen2.5-1.5b", "reward=[math]", "hydra.run.dir=x")
    found = findings(checked(*words), machine(tmp_path, answers={"grpocli plan": Ended(1, json.dumps(plan))}))["plan"]
    advice = "grpocli plan model=qwen2.5-1.5b 'reward=[math]' lists the keys to change"
    assert found == Finding("plan", "error", "needs 9.0 of 8.0 GiB on cuda:0", advice)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Ended(None), "no estimate: grpocli plan did not end within 45 s"),
        (Ended(1, "", "ImportError: libtorch.so"), "no estimate: ImportError: libtorch.so"),
        (Ended(2, "", "grpocli: error: model.path=x: no config"), "no estimate: model.path=x: no config"),
    ],
)
def test_a_plan_that_fails_is_one_line(tmp_path: Path, ended: Ended, reason: str) -> None:
    found = findings(checked("train.steps=3"), machine(tmp_path, answers={"grpocli plan": ended}))["plan"]
    assert found == Finding("plan", "warning", reason, "grpocli plan train.steps=3")


@pytest.mark.parametrize(
    ("plan", "status", "detail"),
    [
        ({"step": {"seconds": {"generation": 7000.0, "update": 3800.0}}}, "warning", "takes the CPU about 3 hours"),
        ({"fits": False}, "error", "the CPU's memory does not hold the run"),
        ({}, "ok", "no GPU; the run computes on the CPU"),
    ],
)
def test_a_cpu_is_ready_only_for_runs_that_it_can_compute(
    plan: dict[str, Any], status: str, detail: str, tmp_path: Path
) -> None:
    answer = {**SMALL, "devices": [{"peak": 1, "memory": 2, "name": ""}], **plan}
    here = machine(tmp_path, answers={"grpocli plan": Ended(0, json.dumps(answer))})
    found = findings(checked("train.steps=3"), here)["devices"]
    assert (found.status, detail in found.detail) == (status, True)
    assert bool(found.advice) == (status != "ok")


def test_a_cpu_without_an_estimate_is_not_called_ready_for_a_model_of_the_hub(tmp_path: Path) -> None:
    here = machine(tmp_path, answers={"grpocli plan": Ended(None)})
    assert findings(checked("model=qwen2.5-1.5b"), here)["devices"].status == "warning"


def test_checkpoints_need_room_in_the_runs_folder(tmp_path: Path) -> None:
    plan = {
        **SMALL,
        "model": {"trained": 10**9, "parameters": 10**9},
        "devices": [{"peak": 1, "memory": 2, "name": ""}],
    }
    here = machine(tmp_path, answers={"grpocli plan": Ended(0, json.dumps(plan))}, free=10 * GIB)
    found = findings(checked("train.steps=60", runs=tmp_path / "other"), here)["checkpoints"]
    assert found.status == "error"
    assert found.detail.startswith(f"{tmp_path / 'other'}: 10.0 GiB free, and the run needs ")
    assert "hydra.run.dir=FOLDER" in found.advice


def test_the_runs_folder_is_that_of_the_overrides(tmp_path: Path) -> None:
    assert runs_in(["hydra.run.dir=runs/first"], tmp_path) == tmp_path / "runs" / "first"
    assert runs_in(["hydra.run.dir='/big/${now:%H}/x'"], tmp_path) == Path("/big")
    assert runs_in(["train.steps=3"], tmp_path) is None


@pytest.mark.parametrize("sync", ["ipc", "nccl"])
def test_a_transport_between_gpus_is_an_error_on_a_cpu(tmp_path: Path, sync: str) -> None:
    found = findings(checked("engine=vllm", f"sync={sync}"), machine(tmp_path, answers=PLAN))["sync"]
    assert (found.status, found.advice) == ("error", "sync=shm")
    assert findings(checked("engine=vllm"), machine(tmp_path / "2", answers=PLAN))["sync"].status == "ok"


def test_engine_vllm_needs_vllm_and_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    here = machine(tmp_path)
    needs = checked("engine=vllm").needs(here)
    assert needs.shared_memory == "engine=vllm"
    found = by_name(engines.vllm(here, needs))["vLLM"]
    assert (found.status, found.detail) == ("error", "not installed; engine=vllm needs it")
    elsewhere = checked("engine=vllm", "engine.base_url=http://127.0.0.1:8000").needs(here)
    assert (elsewhere.vllm, elsewhere.shared_memory) == ("", "")


def test_reward_code_needs_a_sandbox(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert checked("task=mbpp", "reward=[code]").needs(here).sandbox == "reward=[code]"
    assert checked("task=mbpp", "reward=[code]", "reward.code.unsafe=true").needs(here).sandbox == ""


def test_slurm_leaves_devices_to_the_nodes(tmp_path: Path) -> None:
    config = checked("hardware.device=cuda", "engine=vllm", slurm=True)
    here = machine(tmp_path, answers=PLAN)
    needs = config.needs(here)
    assert (needs.slurm, needs.cuda, needs.vllm) == ("hydra/launcher=slurm", "", "")
    assert findings(config, here)["devices"].status == "-"
    assert by_name(surroundings.slurm(here, needs))["SLURM"].status == "error"


def test_a_gpu_that_is_missing_is_an_error(tmp_path: Path) -> None:
    found = findings(checked("hardware.device=cuda"), machine(tmp_path, answers=PLAN))["devices"]
    assert (found.status, "hardware.device=cpu" in found.advice) == ("error", True)


def test_a_broken_torch_leaves_the_other_lines(tmp_path: Path) -> None:
    broken = {"torch_probe": said(code=1, err="ImportError: libcudart.so.13\n"), "grpocli plan": Ended(1, "", "x")}
    config = checked("engine=vllm", "hardware.parallel=zero3", "hardware.processes=2")
    found = findings(config, machine(tmp_path, answers=broken))
    assert {name: one.status for name, one in found.items()} == {"devices": "ok", "sync": "ok", "plan": "warning"}
    assert [one.module for one in config.needs(machine(tmp_path / "2")).modules] == ["deepspeed"]


def test_what_is_neither_here_nor_in_the_cache_comes_from_the_hub(tmp_path: Path) -> None:
    here = machine(tmp_path, reach=lambda url: "no route")
    config = checked("task=gsm8k", "reward=[math]")
    needs = config.needs(here)
    assert needs.hub == "task.path=openai/gsm8k"
    found = by_name(surroundings.hub(here, needs))["hub"]
    assert (found.status, found.detail.endswith("no route; not in the cache: task.path=openai/gsm8k")) == (
        "error",
        True,
    )
    prepared = tmp_path / "home" / ".cache" / "huggingface" / "datasets" / "openai___gsm8k"
    prepared.mkdir(parents=True)
    assert config.needs(here).hub == ""
    other = checked("model=qwen2.5-1.5b", "task=gsm8k")
    assert other.needs(here).hub == "model.path=Qwen/Qwen2.5-1.5B-Instruct"
    both = checked("model=qwen2.5-1.5b", "task=dapo-math-17k").needs(here).hub
    assert both == "model.path=Qwen/Qwen2.5-1.5B-Instruct, task.path=open-r1/DAPO-Math-17k-Processed"
    (prepared.parents[1] / "hub" / "models--Qwen--Qwen2.5-1.5B-Instruct" / "snapshots").mkdir(parents=True)
    assert other.needs(here).hub == ""


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
    answers = {**PLAN, "torch_probe": said(code=1, err="ImportError: libcudart.so.13\n")}
    here = machine(tmp_path, packages=[OWN], answers=answers)
    assert command(monkeypatch, here, "--json", "recipe=dapo-qwen2.5-32b") == 1
    lines: Sequence[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(set(line) == {"name", "status", "detail", "advice"} for line in lines)
    assert [line["advice"] for line in lines if line["status"] in ("warning", "error") and not line["advice"]] == []
    status = {line["name"]: line["status"] for line in lines}
    assert (status["torch"], status["GPUs"], status["plan"]) == ("error", "-", "ok")


def test_text_ends_with_the_number_of_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = machine(tmp_path, packages=[OWN], answers={"torch_probe": said(*TORCH[:1], code=-11)}, free=0)
    assert command(monkeypatch, here) == 1
    out = capsys.readouterr().out
    assert "-> export GRPOCLI_CACHE=FOLDER on another disk" in " ".join(out.split())
    assert "Not ready for the default run: " in out


@pytest.mark.parametrize(
    ("words", "said_by_it"),
    [
        (["train.stepps=3"], 'there is no key train.stepps; did you mean "train.steps"?'),
        (["algorithm=dapoo"], "dapo"),
        (["--jsn"], "--jsn"),
        (
            ["engine=transformers", "hardware.parallel=zero3"],
            "hardware.parallel=zero3: engine=transformers cannot sample",
        ),
    ],
)
def test_exit_code_2_and_one_sentence_for_wrong_usage(
    words: list[str], said_by_it: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("doctor", *words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said_by_it in printed.err
    assert len(printed.err.strip().splitlines()) == 1
