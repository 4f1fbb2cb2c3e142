"""What loads in the background while the run's servers start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.launch.run import _load
from grpocli.launch.trainer_launcher import TrainerJob
from grpocli.rollout.engine import EngineJob


def job_of(model_path: str, folder: Path) -> TrainerJob:
    return TrainerJob(EngineJob(model_path, "float32", 40, folder, seed=0), None)


@pytest.mark.parametrize(("engine", "waits"), [("vllm", True), ("transformers", False)])
def test_the_policy_loads_while_servers_start(tmp_path: Path, engine: str, waits: bool) -> None:
    run = build_run(compose([f"engine={engine}", "model.warm_start_steps=1"]))
    prompts, model = _load(run, job_of(run.model.prepare(), tmp_path))
    assert prompts.draw(0).token_ids
    assert (model is not None) is waits
    assert not model or {str(weight.device) for weight in model.parameters()} == {"cpu"}


def test_weights_that_cannot_be_read_are_told_then(tmp_path: Path) -> None:
    run = build_run(compose(["engine=vllm", "model.warm_start_steps=1"]))
    broken = Path(shutil.copytree(run.model.prepare(), tmp_path / "model"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError) as told:
        _load(run, job_of(str(broken), tmp_path))
    assert told.value.key == "model.path"
