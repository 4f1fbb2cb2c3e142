"""A disk that fills up, or a folder that loses its permission, at any time: one sentence, and the summary."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands.running import SMALL, metrics
from commands.test_failures import failed

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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A little file system; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def options(tmp_path: Path, run: Path, step: int, act: str) -> list[str]:
    """A run whose reward function does something to the run's folder in a step."""
    (tmp_path / "r.py").write_text(REWARD.format(disk=str(run.parent), step=step, act=act))
    reward = ["reward=[python]", f"reward.python.function={tmp_path}/r.py:score"]
    return ["train", *SMALL, *reward, "eval.problems=0", f"hydra.run.dir={run}"]


@pytest.mark.parametrize(
    ("step", "room", "every"),
    [
        pytest.param(2, 0, 20, id="nothing more"),
        pytest.param(2, 1 << 16, 1, id="the checkpoint"),
        pytest.param(3, 1 << 16, 20, id="the last checkpoint"),
    ],
)
def test_a_disk_that_fills_up(step: int, room: int, every: int, grpocli, tmp_path: Path, disk: Path) -> None:
    run = disk / "run"
    argv = options(tmp_path, run, step, f"fill({room})")
    code, said = failed(grpocli, *argv, f"checkpoint.every={every}")
    assert code == 1
    assert "no space left on the disk while writing" in said
    assert f"resume={run}" in said
    assert "no space left" in json.loads((run / "summary.json").read_text())["exit"].lower()
    assert not (run / ".reserve").exists()
    (disk / "filler").unlink()
    assert grpocli("train", f"resume={run}")[0] == 0
    assert json.loads((run / "summary.json").read_text())["exit"] == "done"


def test_a_folder_that_loses_its_permission(tmp_path: Path) -> None:
    """Root may write anywhere, but without that capability it is a user like any other."""
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "grpocli", *options(tmp_path, run, 2, f"os.chmod({str(run)!r}, 0o555)")]
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv to give up root's right to write anywhere")
        argv = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    run.chmod(0o755)
    assert done.returncode == 1, done.stdout + done.stderr
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"grpocli: error: hydra.run.dir={run}: Permission denied (")
    assert said.endswith(f"; make it writable, then resume={run}")
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
