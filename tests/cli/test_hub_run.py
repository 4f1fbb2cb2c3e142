"""Whole runs that push to a stand-in hub, and that start from what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.running import SMALL, assert_same_run, metrics, run_here
from huggingface_hub import snapshot_download
from publish.test_push import hub
from publish.test_push import pytestmark as of_the_hub
from stand_in_hub import StandInHub

pytestmark = [pytest.mark.processes, of_the_hub]
__all__ = ["hub"]
RUN = ["engine=fake", *SMALL, "checkpoint.every=1"]
Grpocli = Callable[..., tuple[int, str, str]]


def steps_on(hub: StandInHub, name: str) -> list[str]:
    files = hub.repos[name].files("main") or {}
    return sorted({path.split("/")[1] for path in files if path.startswith("checkpoints/")})


def test_a_run_is_pushed_and_another_machine_goes_on_with_it(hub: StandInHub, tmp_path: Path) -> None:
    pushed = ["hub.push=me/new", "hub.checkpoints=true", "checkpoint.keep=2"]
    assert run_here("train", *RUN, *pushed, "train.steps=2", "hydra.run.dir=first") == 0
    assert steps_on(hub, "me/new") == ["step_000001", "step_000002"]
    assert "model.safetensors" in (hub.repos["me/new"].files("main") or {})
    snapshot_download("me/new", local_dir="second")
    assert run_here("train", "resume=second", "train.steps=3") == 0
    assert run_here("train", *RUN, "train.steps=3", "hydra.run.dir=whole") == 0
    assert_same_run(tmp_path / "second", tmp_path / "whole")
    assert steps_on(hub, "me/new") == ["step_000002", "step_000003"]
    assert json.loads((hub.repos["me/new"].files("main") or {})["summary.json"])["steps"] == 3


def test_a_failed_push_costs_a_run_nothing(hub: StandInHub, tmp_path: Path, grpocli: Grpocli) -> None:
    hub.refuse["/api/models/me/new/commit"] = 400
    _, out, _ = grpocli("train", *RUN, "hub.push=me/new", "hub.checkpoints=true", "hydra.run.dir=one", code=0)
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["exit"] == "done"
    assert out.count("the checkpoint of step") == 1
    assert "refused by the test" in out
    (command,) = [line.partition("push it with: ")[2] for line in out.splitlines() if "warning: not pushed: " in line]
    hub.refuse.clear()
    assert run_here(*command.split()[1:]) == 0
    assert "model.safetensors" in (hub.repos["me/new"].files("main") or {})


def test_a_run_that_may_not_be_pushed_does_not_begin(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, grpocli: Grpocli
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader_token")
    _, _, err = grpocli("train", *RUN, "hub.push=me/new", "hydra.run.dir=one", code=2)
    assert "hub.push=me/new: the token may not do this" in err
    assert not Path("one").exists()


def test_without_push_there_is_no_request(hub: StandInHub) -> None:
    assert run_here("train", *RUN, "train.steps=1", "hydra.run.dir=one") == 0
    assert hub.requests == []


@pytest.mark.survival
def test_a_pushed_model_starts_a_run_and_is_evaluated(hub: StandInHub, grpocli: Grpocli) -> None:
    assert run_here("train", *RUN, "train.steps=1", "hub.push=me/new", "hub.checkpoints=true", "hydra.run.dir=a") == 0
    commit = hub.repos["me/new"].branches["main"]
    rest = [one for one in RUN if not one.startswith("model.")]
    small = ["train.steps=1", "rollout.max_prompt_tokens=32", "rollout.max_completion_tokens=8"]
    assert run_here("train", f"model.path=hub:me/new@{commit}", *rest, *small, "hydra.run.dir=b") == 0
    assert metrics(Path("b"))[0]["step"] == 1
    assert "base_model: me/new" in Path("b", "model", "README.md").read_text()
    teacher = ["algorithm/kl=reverse", f"algorithm.kl.model=hub:me/new@{commit}", "algorithm.kl.beta=0.1"]
    assert run_here("train", f"model.path=hub:me/new@{commit}", *rest, *small, *teacher, "hydra.run.dir=c") == 0
    code, out, err = grpocli("eval", f"model=hub:me/new@{commit}", "engine=fake", "--problems", "2", "--samples", "1")
    assert code == 0, err
    assert "accuracy" in out
