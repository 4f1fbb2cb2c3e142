"""A damaged checkpoint is named and never used. Each kind of damage has its own copy of one run."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.running import EVEN, SMALL, assert_same_run, metrics, run_here
from cli.test_failures import failed
from composed import refused

from grpocli.errors import ConfigError
from grpocli.training import checkpoint as resuming
from grpocli.training.checkpoint import CHECKSUMS, _checksum, resume_point

pytestmark = pytest.mark.processes

RUN = ["train", *SMALL, *EVEN, "eval.problems=0", "checkpoint.every=1", "optim.warmup_steps=2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with the checkpoints of the last two."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(*RUN, f"hydra.run.dir={run}") == 0
    assert all(row["grad_norm"] > 0 for row in metrics(run))
    return run


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the run, as if killed before its summary."""
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy)
    shutil.rmtree(copy / "model")
    (copy / "summary.json").unlink()
    return copy


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_000003"


def change(path: Path, how: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    how(content)
    path.write_bytes(content)


def flipped(content: bytearray) -> None:
    content[-100] ^= 4


def zeroed(content: bytearray) -> None:
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(4096)


def counted_otherwise(at: Path) -> None:
    text = (at / "trainer.json").read_text()
    (at / "trainer.json").write_text(text.replace('"draws": 12', '"draws": 16'))


def of_another_run(at: Path) -> None:
    """An intact checkpoint with checksums of another run."""
    state = json.loads((at / "trainer.json").read_text())
    (at / "trainer.json").write_text(json.dumps(state | {"run": "0123456789abcdef"}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit": (lambda at: change(at / "model.safetensors", flipped), "model.safetensors differs from what was written"),
    "a counter": (counted_otherwise, "trainer.json differs from what was written"),
    "no state": (lambda at: (at / "trainer.json").unlink(), "trainer.json is missing"),
    "another file": (lambda at: (at / "stream.json").touch(), "stream.json does not belong to the checkpoint"),
    "of another run": (of_another_run, "it is of another run"),
    "its checksums": (lambda at: (at / "checksums.json").write_text("[]"), "checksums.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_offered(kind: str, run: Path) -> None:
    assert resume_point(run, fallback=False).path == newest(run)
    damage, problem = DAMAGES[kind]
    damage(newest(run))
    with pytest.raises(ConfigError) as error:
        resume_point(run, fallback=False)
    assert f"resume: the checkpoint {newest(run)} is damaged ({problem}" in str(error.value)
    assert "resume_fallback=true goes on from step_000002, the newest one that is whole" in str(error.value)
    assert resume_point(run, fallback=True).path == newest(run).with_name("step_000002")


def test_resume_fallback_uses_the_previous_checkpoint(grpocli, undisturbed: Path, run: Path) -> None:
    """The run ends with the same result; its log and sessions name the damage."""
    change(newest(run) / "model.safetensors", flipped)
    sentence = (
        "the checkpoint step_000003 was damaged (model.safetensors differs from what was written) "
        "and renamed to damaged_step_000003"
    )
    _, out, err = grpocli("train", f"resume={run}", "resume_fallback=true", code=0)
    assert f"{sentence}; continuing from {run}/checkpoints/step_000002" in out + err
    assert sentence in (run / "run.log").read_text()
    assert json.loads((run / "sessions.jsonl").read_text().splitlines()[-1])["fallback"] == [sentence]
    assert_same_run(run, undisturbed)
    for file in newest(undisturbed).glob("*.safetensors"):
        assert (newest(run) / file.name).read_bytes() == file.read_bytes()
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"step_000002", "step_000003", "damaged_step_000003"}


def test_a_resume_after_a_kill_within_a_checkpoint_equals_never_having_stopped(undisturbed: Path, run: Path) -> None:
    """The checkpoint's folder is empty, or has its temporary name, and the log has a cut line."""
    shutil.rmtree(newest(run))
    newest(run).mkdir()
    half = run / "checkpoints" / ".tmp-step_000003-1"
    half.mkdir()
    (half / "trainer.json").write_text('{"step": 3')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert run_here("train", f"resume={run}") == 0
    assert_same_run(run, undisturbed)


def test_a_run_without_an_intact_checkpoint_is_reported(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        change(path / "model.safetensors", zeroed)
    with pytest.raises(ConfigError, match="no other one is whole: start a new run"):
        resume_point(run, fallback=True)


@pytest.mark.parametrize(
    ("name", "record", "saved"),
    [
        ("summary.json", {"exit": "done", "steps": 3}, True),
        ("summary.json", {"exit": "stopped after step 2", "steps": 2, "checkpoint": 2}, True),
        ("summary.json", {"exit": "KeyboardInterrupt", "steps": 2, "checkpoint": 0}, False),
        ("metrics.jsonl", {"step": 2, "time/checkpoint": 0.1}, True),
        ("metrics.jsonl", {"step": 2, "loss": 0.1}, False),  # killed before its first checkpoint
        ("sessions.jsonl", {"step": 1, "time": "", "versions": {}, "changes": {}}, True),
        ("sessions.jsonl", {"step": 0, "time": "", "versions": {}, "changes": {}}, False),
    ],
)
def test_a_run_whose_checkpoints_were_deleted_does_not_begin_again(
    name: str, record: dict[str, Any], saved: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / name).write_text(json.dumps(record) + "\n")
    if not saved:
        assert resume_point(tmp_path, fallback=True).path is None
        return
    with refused("resume"):
        resume_point(tmp_path, fallback=True)


def test_missing_metrics_are_reported(grpocli, run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    _, out, err = grpocli("train", f"resume={run}", code=0)
    assert f"{run}/metrics.jsonl lacks 3 of the 3 steps done" in out + err
    assert "train.steps=3: 3 steps are done, so none is left; raise it to train on" in out + err


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optimizer-00001.safetensors", lambda text: text[:50]),
        ("optimizer.safetensors.index.json", lambda text: text.replace(b"optimizer-0", b"../../../optimizer-0")),
    ],
)
def test_damage_that_the_checksums_have_too_is_found(name: str, damage, grpocli, run: Path) -> None:
    """What was damaged before it was written."""
    file, index = newest(run) / name, newest(run) / CHECKSUMS
    file.write_bytes(damage(file.read_bytes()))
    index.write_text(json.dumps(json.loads(index.read_text()) | {name: _checksum(file)}))
    said = failed(grpocli, 2, "train", f"resume={run}")
    assert f"resume: the checkpoint {newest(run)} cannot be read" in said
    assert "remove that folder" in said


def test_a_checkpoint_that_may_be_intact_is_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary failure of permissions or of a network file system costs no steps."""

    def check(folder: Path, progress: object) -> None:
        raise OSError(errno.ESTALE, "not now", str(folder / "model.safetensors"))

    monkeypatch.setattr(resuming, "check_files", check)
    with pytest.raises(OSError, match="not now"):
        resume_point(run, fallback=True)
