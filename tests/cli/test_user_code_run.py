"""A run finishes although its reward misuses threads, alarms, descriptors and child processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.running import SMALL, finish, metrics, start

pytestmark = pytest.mark.processes

REWARD = """
import os, signal, threading, time

def score(completions, **kwargs):
    threading.Thread(target=time.sleep, args=(600,), name="mine").start()
    signal.alarm(1)
    os.chdir("/")
    os.close(0)
    if os.fork() == 0:
        return [0.0] * len(completions)
    return [1.0] * len(completions)
"""


@pytest.mark.survival
def test_a_reward_may_misuse_threads_alarms_descriptors_and_children(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(REWARD)
    run = ["train", *SMALL, "eval.problems=0", "train.steps=2", f"reward=[{tmp_path}/r.py:score]"]
    code, said = finish(start(*run, f"hydra.run.dir={tmp_path}/run"))
    assert code == 0, said
    assert "grpocli: a thread (mine, mine) that your code started in this process did not end" in said
    assert said.count("grpocli: r.py:score forked a process that returned from it; grpocli ended that process") == 2
    assert [(row["step"], row["rewards/score/mean"]) for row in metrics(tmp_path / "run")] == [(1, 1), (2, 1)]
    assert (tmp_path / "run" / "model").is_dir()
