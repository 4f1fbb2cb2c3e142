"""Several tasks in one run: shares, rewards and metrics of each, and a resume with the same prompts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli.running import SMALL, metrics

pytestmark = pytest.mark.processes


BREAKS = """
class Breaks:
    def reset(self, metadata):
        return {}

    def step(self, messages, metadata):
        raise ValueError("no board")
"""


def test_a_broken_environment_does_not_end_the_other_tasks_if_the_config_allows_it(grpocli, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    two = ["train", *SMALL, "eval.problems=0", "train.steps=2", "task=[arithmetic]", "+task@task.board=arithmetic"]
    board = [*two, "task.board.environment.name=breaks.py:Breaks", "task.board.environment.workers=1"]
    code, out, err = grpocli(*board, "task.board.max_reward_errors=1", f"hydra.run.dir={tmp_path}/goes_on")
    assert code == 0, err
    assert len(re.findall(r"could not score (\d+) of \1 samples of task board, which task\.board\.max_", out)) == 1
    for row in metrics(tmp_path / "goes_on"):
        assert row["task/board/errors"] == row["rewards/exact_match/errors"] > row["task/arithmetic/errors"] == 0
        assert row["task/board/reward"] is None
        assert row["task/arithmetic/reward"] is not None
