"""A full disk or an unwritable folder at any time gives a one-sentence error and a summary."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.running import SMALL, metrics
from cli.test_failures import failed

pytestmark = pytest.mark.processes

REWARD = """
import errno, os
from pathlib import Path

calls = 0

def fill(room):
    with open(Path({disk!r}) / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        os.ftruncate(file.fileno(), file.tell() - room)

def score(completions, **kwargs):
    global calls
    calls += 1
    if calls == {step}:
        {act}
    return [float(len(text)) for text in completions]
"""


def options(tmp_path: Path, run: Path, step: int, act: str) -> list[str]:
    """A run whose reward function changes the run's folder during a step."""
    (tmp_path / "r.py").write_text(REWARD.format(disk=str(run.parent), step=step, act=act))
    reward = ["reward=[python]", f"reward.python.function={tmp_path}/r.py:score", "reward.python.process=false"]
    return ["train", *SMALL, *reward, "eval.problems=0", f"hydra.run.dir={run}"]


@pytest.mark.parametrize("small_disk", ["32m"], indirect=True)
@pytest.mark.parametrize(
    ("room", "every"),
    [(1 << 16, 1), pytest.param(0, 20, marks=pytest.mark.survival)],
    ids=["a checkpoint", "nothing more"],
)
def test_a_full_disk_is_reported_in_one_sentence(
    room: int, every: int, grpocli, tmp_path: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    argv = options(tmp_path, run, 2, f"fill({room})")
    said = failed(grpocli, 1, *argv, f"checkpoint.every={every}")
    assert "no space left on the disk while writing" in said
    assert f"resume={run}" in said
    assert "no space left" in json.loads((run / "summary.json").read_text())["exit"].lower()
    assert not (run / ".reserve").exists()
    assert {path.name for path in (run / "checkpoints").glob("*")} == ({"step_000001"} if every == 1 else set())
    (small_disk / "filler").unlink()
    assert grpocli("train", f"resume={run}")[0] == 0
    assert json.loads((run / "summary.json").read_text())["exit"] == "done"


def test_a_run_without_its_model_is_not_finished(grpocli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, there = tmp_path / "run", []

    def save_model(*_: object) -> None:
        there.append((run / "summary.json").exists())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("grpocli.training.checkpoint.save_model", save_model)
    said = failed(grpocli, 1, "train", *SMALL, "train.steps=1", "eval.problems=0", f"hydra.run.dir={run}")
    assert "no space left on the disk" in said
    assert there == [False]


@contextmanager
def without_root_s_rights() -> Iterator[None]:
    """This thread and its children have no capabilities that let root write anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    effective, *others = before
    assert libc.capset(header, (ctypes.c_uint32 * 6)(effective & ~0b110, *others)) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def test_a_folder_that_becomes_unwritable_is_reported(grpocli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = options(tmp_path, run, 2, f"os.chmod({str(run)!r}, 0o555)")
    with without_root_s_rights():
        said = failed(grpocli, 1, *argv)
    run.chmod(0o755)
    assert f"{run}/checkpoints: Permission denied" in said
    assert said.endswith(f"; fix that, then resume={run}")
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
