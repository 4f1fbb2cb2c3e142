"""What loads in the background while the run's servers start, and what remains of a run that did not begin."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composed import refused

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.hardware import Devices
from grpocli.launch import run as launch_run
from grpocli.launch.run import _launched, _load, run_errors
from grpocli.launch.trainer_launcher import TrainerJob
from grpocli.rollout.engine import EngineJob, EnginePart
from grpocli.runs.run_dir import RunDir
from grpocli.views.view import View


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
    with refused("model.path"):
        _load(run, job_of(str(broken), tmp_path))


class Engine(EnginePart):
    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        job.progress(0, 0, "vLLM is loading weights")
        return nullcontext()


def test_a_broken_data_file_is_told_while_the_engine_starts(tmp_path: Path) -> None:
    loading: Future[Any] = Future()
    loading.set_exception(ConfigError("line 3 is not JSON", key="task.path"))
    run, job = SimpleNamespace(engine=Engine()), job_of("/m", tmp_path).engine
    with refused("task.path"), _launched(run, job, View(), loading):  # type: ignore[arg-type]
        pytest.fail("the engine must not have started")


@pytest.mark.parametrize(("log", "kept"), [("rank_0.log", False), ("vllm_0.log", True)])
def test_the_folder_is_kept_if_it_has_the_log_of_a_server(log: str, kept: bool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.path / "logs").mkdir(parents=True)
    (run.path / "logs" / log).touch()
    with pytest.raises(ConfigError), run_errors(run, new=True):
        raise ConfigError("there is no such model", key="model", value="one")
    assert run.path.exists() == kept


TWO_MACHINES = ["hardware=multinode", "hardware.devices_per_node=1", "hardware.parallel=ddp"]


@pytest.mark.parametrize(
    ("words", "transport", "shared"),
    [
        ([], "shm", False),
        ([*TWO_MACHINES], "shm", True),
        ([*TWO_MACHINES], "nccl", False),
        ([*TWO_MACHINES, "model.lora.rank=8"], "nccl", True),
    ],
)
def test_files_for_other_machines_are_in_the_run_folder(
    words: list[str], transport: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_run, "check_devices", lambda *_: None)
    run = build_run(compose(["engine=vllm", "model.warm_start_steps=1", *words]))
    monkeypatch.setattr(type(run.sync), "choose", lambda *_: transport)
    folder = launch_run.prepare(run, RunDir(tmp_path), View(), Devices(1)).engine.sync_folder
    assert (folder is not None) == shared
    assert folder is None or Path(folder).is_relative_to(tmp_path)
