"""wandb, trackio and mlflow, as the extras install them, on this machine alone; tensorboard is in test_trackers.py."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LOG = """
import sys
from pathlib import Path
from accelerate import PartialState
from grpocli.tracking.trackers import Accelerate

PartialState()
live = Accelerate(kind=sys.argv[1], project="mine").start("run", Path(sys.argv[2]), {"seed": 7, "a": {"b": None}})
for step in (1, 2, 3):
    live.log({"reward": step / 4, "kl": float("nan"), "eval/pass@2": 1.0, "note": "text"}, step)
live.finish()
"""


def logged(kind: str, folder: Path, **variables: str) -> None:
    """Log three steps in a process of their own: these libraries start threads and keep global state."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}
    command = [sys.executable, "-c", LOG, kind, str(folder)]
    done = subprocess.run(command, env=environment | variables, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wandb_offline(tmp_path: Path) -> None:
    logged("wandb", tmp_path, WANDB_MODE="offline")
    (file,) = (tmp_path / "wandb" / "wandb").glob("offline-run-*/run-*.wandb")
    text = file.read_bytes()
    assert text.count(b"eval/pass_at_2") >= 3
    assert b"0.75" in text
    assert b"note" not in text


@pytest.mark.survival
def test_mlflow(tmp_path: Path) -> None:
    store = tmp_path / "mlflow.db"
    logged("mlflow", tmp_path, MLFLOW_TRACKING_URI=f"sqlite:///{store}")
    with sqlite3.connect(store) as database:
        rewards = database.execute("select step, value from metrics where key = 'reward' order by step").fetchall()
        others = database.execute("select distinct key from metrics where key != 'reward'").fetchall()
        parameters = dict(database.execute("select key, value from params").fetchall())
        (run,) = database.execute("select name, status from runs").fetchall()
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert others == [("eval/pass_at_2",)]
    assert parameters == {"seed": "7", "a.b": "None"}
    assert run == ("run", "FINISHED")


def test_trackio(tmp_path: Path) -> None:
    logged("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, json.loads(metrics)["reward"]) for name, _, metrics in rows] == [("run", n / 4) for n in (1, 2, 3)]
