"""The output during long operations."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.launch import run as launching
from grpocli.launch.trainer_launcher import TrainerJob
from grpocli.rollout.engine import EngineJob, EnginePart
from grpocli.views.view import View

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_the_installation_prints_its_steps(tmp_path: Path) -> None:
    """uv and pip print their downloads unless they are quiet."""
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}/venv", "train"]
    recipe = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'echo "installing' in recipe
    assert "pip install" in recipe
    assert "--quiet" not in recipe


@pytest.mark.processes
def test_libraries_show_no_bars_of_their_own() -> None:
    script = """import contextlib
from grpocli.cli import main
with contextlib.suppress(SystemExit):
    main(["--version"])
import datasets, transformers
print(transformers.utils.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled())"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False True"


class RecordingView(View):
    """Collects stages, units of progress and notes."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def stage(self, text: str, fraction: float | None = None) -> None:
        self.recorded.append(text)

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        self.recorded.append(unit)

    def note(self, text: str) -> None:
        self.recorded.append(text)


class Engine(EnginePart):
    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        job.progress(0, 0, "vLLM is loading weights")
        (job.run_dir / "logs").mkdir()
        (job.run_dir / "logs" / "vllm_0.log").touch()
        self.later = job.progress
        return nullcontext()


def test_the_start_of_an_engine_prints_two_lines_and_its_phases(tmp_path: Path) -> None:
    view, engine = RecordingView(), Engine()
    run: Any = SimpleNamespace(engine=engine)
    job = EngineJob("/m", "float32", 8, tmp_path, seed=0)
    with launching._launched(run, job, view, None):
        began, *then = view.recorded
        assert began.startswith("starting engine=")
        assert then[0] == "vLLM is loading weights"
        assert len(then) == 2
        assert str(tmp_path / "logs" / "vllm_0.log") in then[1]
        engine.later(0, 0, "a server that is started again")
        assert view.recorded[1:] == then


def test_a_broken_data_file_is_told_while_the_engine_starts(tmp_path: Path) -> None:
    loading: Future[Any] = Future()
    loading.set_exception(ConfigError("line 3 is not JSON", key="task.path"))
    run: Any = SimpleNamespace(engine=Engine())
    job = EngineJob("/m", "float32", 8, tmp_path, seed=0)
    with pytest.raises(ConfigError) as told, launching._launched(run, job, RecordingView(), loading):
        pytest.fail("the engine must not have started")
    assert told.value.key == "task.path"


def test_a_saved_job_has_no_progress_function(tmp_path: Path) -> None:
    job = TrainerJob(EngineJob("/m", "float32", 8, tmp_path, seed=0), None)
    job.save(tmp_path)
    assert TrainerJob.load(tmp_path) == job
    assert "progress" not in (tmp_path / "job.json").read_text()
