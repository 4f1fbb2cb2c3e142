"""Several tasks in one run: shares, rewards and metrics of each, and a resume with the same prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.running import SMALL, assert_resumes_exactly, metrics, run_here

from grpocli.runs.rollouts import read_rollouts

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
    grpocli(*board, "rollout.max_reward_errors=1", f"hydra.run.dir={tmp_path}/goes_on", code=0)
    for row in metrics(tmp_path / "goes_on"):
        assert row["task/board/errors"] == row["rewards/exact_match/errors"] > row["task/arithmetic/errors"] == 0
        assert row["task/board/reward"] is None
        assert row["task/arithmetic/reward"] is not None


@pytest.mark.survival
def test_a_mixture_keeps_its_shares_and_each_tasks_rewards_also_after_a_resume(tmp_path: Path) -> None:
    whole, tasks = tmp_path / "whole", ["task=[arithmetic]", "+task@task.minus=arithmetic", "task.minus.operation=-"]
    tasks += ["task.arithmetic.weight=3", "task.arithmetic.rewards=[exact_match]", "task.minus.rewards=[format]"]
    shape = ["rollout.prompts_per_step=8", "rollout.group_size=2", "eval.problems=0", "train.steps=4"]
    shape += ["reward=[exact_match,format]", "reward.format.pattern='.*[02468]'", "checkpoint.every=1"]
    assert run_here("train", *SMALL, *tasks, *shape, "checkpoint.keep=0", f"hydra.run.dir={whole}") == 0
    drawn = 0
    for row in metrics(whole):
        trained = read_rollouts(whole / "rollouts" / f"step_{row['step']:06d}.parquet")
        for one in trained:
            minus = "-" in one["prompt"]
            assert one["task"] == ("minus" if minus else "arithmetic")
            assert [one["reward/exact_match"] is None, one["reward/format"] is None] == [minus, not minus]
        right = [one["reward/format"] for one in trained if one["task"] == "minus"]
        assert row["task/minus/reward"] == pytest.approx(sum(right) / len(right))
        drawn += len(right)
    assert drawn == pytest.approx(64 / 4, abs=2)  # of two completions each
    assert_resumes_exactly(whole, 2, tmp_path / "killed")
