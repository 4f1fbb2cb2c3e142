"""A refused command leaves a run's folder unchanged, to the byte and to the nanosecond."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from grpocli.composition.compose import compose, save
from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir

SLURM = ["-m", "hydra/launcher=slurm", "hydra.launcher.dry_run=true"]


def digest(folder: Path) -> dict[str, tuple[int, bytes]]:
    """{name: (time of the last change, content)} of everything in a folder."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


def make_run(folder: Path, exit_: str = "stopped") -> RunDir:
    """The folder of a run of three steps."""
    run = RunDir(folder)
    overrides = ["train.steps=3", "optim.lr=0.5"]
    for path in (run.path / ".hydra", run.checkpoints / "step_000003", run.model):
        path.mkdir(parents=True)
    config = compose(overrides)
    config.overrides = overrides
    run.config.write_text(save(config))
    (run.path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    run.metrics.write_text('{"step": 3}\n')
    run.summary.write_text(json.dumps({"steps": 3, "exit": exit_}))
    for name in (".lock", ".workers", "run.log", "stop"):
        (run.path / name).touch()
    return run


REFUSED = {
    "a new run": ["train", "hydra.run.dir={run}"],
    "with Hydra's own files": [
        *("train", "hydra.run.dir={run}", "hydra.output_subdir=.hydra", "hydra/job_logging=default")
    ],
    "that cannot work": ["train", "rollout.group_size=1", "hydra.run.dir={run}"],
    "a sweep": ["train", "-m", "seed=0,1", "hydra.sweep.dir={sweep}"],
    "a sweep for SLURM": ["train", *SLURM, "seed=0,1", "hydra.sweep.dir={sweep}"],
    "a resume with a key that does not exist": ["train", "resume={run}", "train.stepz=4"],
    "a resume with a value that cannot work": ["train", "resume={run}", "train.steps=0"],
    "a resume with another shape": ["train", "resume={run}", "model.lora.rank=8", "train.steps=4"],
    "a resume and a sweep": ["train", "-m", "resume={run}", "seed=0,1"],
    "an evaluation of a part of it": ["eval", "--run", "{run}", "--checkpoints", "7", "--out", "{run}"],
    "a server": ["vllm-serve", "hydra.run.dir={run}", "model=nothing"],
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "sweep" / "0")


@pytest.fixture
def untouched(run: RunDir) -> Iterator[None]:
    (run.path.parent / "multirun.yaml").write_text("before")
    before = digest(run.path.parent)
    yield
    assert digest(run.path.parent) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_command_changes_nothing(kind: str, grpocli, run: RunDir, untouched: None) -> None:
    argv = [word.format(run=run.path, sweep=run.path.parent) for word in REFUSED[kind]]
    code, out, err = grpocli(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("grpocli: error: ")


@pytest.mark.slow
def test_a_refused_resume_of_a_running_run_changes_nothing(grpocli, run: RunDir, untouched: None) -> None:
    with run.locked():
        code, _, err = grpocli("train", f"resume={run.path}", "train.steps=4", "engine=transformers")
    assert code == 2
    assert f"resume={run.path}: another process is running in it" in err


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--cfg", "job"], ["--cfg", "all"]])
def test_printing_changes_nothing(argv: list[str], grpocli, run: RunDir, untouched: None) -> None:
    for given in (f"hydra.run.dir={run.path}", f"resume={run.path}"):
        assert grpocli("train", given, *argv)[0] == 0


def test_a_resume_of_a_finished_run_changes_nothing(grpocli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "done")
    before = digest(run.path)
    code, out, err = grpocli("train", f"resume={run.path}", "optim.lr=0.1")
    assert (code, err) == (0, "")
    assert re.search(r"is finished after 3 steps.* train\.steps=N above 3 trains more", out)
    assert digest(run.path) == before


@pytest.mark.slow
def test_a_new_run_that_cannot_work_leaves_no_folder(grpocli, tmp_path: Path) -> None:
    for argv in (["task=jsonl", "task.path=none.jsonl"], ["-m", "eval.reward=nothing", "hydra.sweep.dir=sweep"]):
        assert grpocli("train", "hydra.run.dir=run", *argv)[0] == 2
        assert not list(tmp_path.glob("run"))
        assert not list(tmp_path.glob("sweep/0"))


@pytest.mark.parametrize("name", ["model/config.json", "checkpoints/mine", "rollouts/mine", "summary.json"])
def test_a_folder_with_files_that_a_run_would_overwrite_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="has files that the run would overwrite"):
        RunDir(tmp_path).check_free()
