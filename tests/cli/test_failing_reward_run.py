"""A run whose reward raises: its last whole step is saved, and the resumed run is the unbroken one."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.running import SMALL, metrics, run_here, without_times

REWARD = """
from pathlib import Path

def even(completions):
    calls = Path(__file__).with_name("calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if len(calls.read_text()) >= 3 and not calls.with_name("mended").exists():
        raise KeyError("third")
    return [float(len(str(one)) % 2) for one in completions]
"""
pytestmark = pytest.mark.processes


def test_the_last_whole_step_is_saved_when_a_reward_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    given = ["train", *SMALL, "eval.problems=0", "train.steps=4", "checkpoint.every=0"]
    given += [f"reward=[{tmp_path}/mine.py:even]"]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert run_here(*given, f"hydra.run.dir={broken}") == 1
    assert [one.name for one in (broken / "checkpoints").iterdir()] == ["step_000002"]
    assert "step 2 is saved" in capsys.readouterr().err
    (tmp_path / "mended").touch()
    assert run_here("train", f"resume={broken}") == 0
    assert run_here(*given, f"hydra.run.dir={whole}") == 0
    assert without_times(metrics(broken)) == without_times(metrics(whole))
