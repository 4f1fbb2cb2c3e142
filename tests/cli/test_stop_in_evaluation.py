"""Ctrl-C during an evaluation ends it with a checkpoint; a resume repeats it and equals an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.running import SMALL, assert_same_run, metrics

pytestmark = pytest.mark.processes

REWARD = """
import os, signal
from pathlib import Path

LEFT = Path(__file__).with_name("evaluations_left")

def resumed():
    return (LEFT.parent / "run" / "checkpoints" / "step_000000").exists()

def even(completions, **kwargs):
    if len(completions) == 8 and LEFT.exists():  # the samples of an evaluation; its greedy answers are still to come
        left = int(LEFT.read_text())
        LEFT.write_text(str(left - 1))
        if left == 0:
            LEFT.unlink()
            os.kill(os.getpid(), signal.SIGTERM if resumed() else signal.SIGINT)
    return [float((one[0]['content'] or '9')[:1] in '02468') for one in completions]
"""


def test_a_run_stops_during_an_evaluation(grpocli, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    reward = ["reward=[python]", f"reward.python.function={tmp_path}/rewards.py:even", "reward.python.process=false"]
    command = ["train", *SMALL, *reward, "train.steps=2", "eval.every=1", "checkpoint.every=0"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    assert grpocli(*command, f"hydra.run.dir={undisturbed}")[0] == 0

    (tmp_path / "evaluations_left").write_text("0")
    _, _, err = grpocli(*command, f"hydra.run.dir={run}", code=3)
    assert f"SIGINT after step 0; resume with: grpocli train resume={run}" in err
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000000"]
    assert not (run / "metrics.jsonl").exists(), "the stop came before the first step"

    (tmp_path / "evaluations_left").write_text("1")  # the evaluation before the first step is repeated
    assert "SIGTERM after step 1" in grpocli("train", f"resume={run}", code=3)[2]
    assert [row["step"] for row in metrics(run)] == [1]
    assert "eval/accuracy" not in metrics(run)[0]
    assert json.loads((run / "summary.json").read_text())["steps"] == 1

    grpocli("train", f"resume={run}", code=0)
    assert_same_run(run, undisturbed)
    assert "eval/accuracy" in metrics(run)[0]
    for key in ("eval/accuracy_before", "eval/accuracy"):
        one, two = (json.loads((folder / "summary.json").read_text())[key] for folder in (run, undisturbed))
        assert one == two
