"""Whole runs with a curriculum: a resume repeats every draw, with leftover groups and prefetching; processes agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.copied import config_dir
from cli.running import assert_same_run, killed_after, metrics, run_here

from grpocli.runs.rollouts import read_rollouts
from grpocli.tasks.curriculum import load_problems

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
RUN = [
    "train",
    "model.warm_start_steps=20",
    "task.train_size=12",
    "task.order=difficulty",
    "task.no_resampling_pass_rate=0.75",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "eval.problems=0",
    "checkpoint.every=1",
    "checkpoint.keep=0",
    "reward=[exact_match]",
]
HALF = ["engine=fake", 'engine.completions=["{answer}","7"]']
"""Half of the completions are right."""


def drawn(run: Path) -> list[list[tuple[str, int]]]:
    """The draws and rows of each step's file."""
    files = sorted((run / "rollouts").iterdir())
    return [list(dict.fromkeys((row["uid"], row["row"]) for row in read_rollouts(file))) for file in files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("curriculum") / "run"
    options = ["algorithm=dapo", "algorithm.keep.surplus=carry", "train.steps=5", f"hydra.run.dir={run}"]
    assert run_here(*RUN, *HALF, *options) == 0
    return run


def test_a_resume_draws_the_same_problems(whole: Path, tmp_path: Path) -> None:
    rows = metrics(whole)
    assert any(row["sampling/carried"] for row in rows), "leftover groups are found again by their rows"
    assert rows[-1]["curriculum/resting"] > 0
    assert any("curriculum/pass_rate" in row for row in rows)
    killed = killed_after(2, whole, tmp_path / "killed")
    assert run_here("train", f"resume={killed}") == 0
    assert drawn(killed) == drawn(whole)
    assert_same_run(killed, whole)
    one, two = (load_problems(run / "checkpoints" / "step_000005") for run in (whole, killed))
    assert repr(one) == repr(two)


@pytest.mark.survival
def test_prefetched_steps_draw_by_the_scores_of_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread collects all steps in order, so scores are known at the same draws, trained or not."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    engine = config_dir(tmp_path / "conf")
    options = [*engine, "reward=[format]", "reward.format.pattern='.*[02468]'", "train.steps=6", "optim.lr=3e-3"]
    whole = tmp_path / "whole"
    assert run_here(*RUN, *options, "rollout.max_staleness=1", f"hydra.run.dir={whole}") == 0
    assert any(row.get("curriculum/resting") for row in metrics(whole))
    killed = killed_after(3, whole, tmp_path / "killed")
    assert run_here("train", *engine[:2], f"resume={killed}") == 0
    assert drawn(killed) == drawn(whole)
    assert_same_run(killed, whole)
    (saved,) = load_problems(whole / "checkpoints" / "step_000003").values()
    assert max(saved["step"]) == 4, "of the step that was collected ahead"


@pytest.mark.survival
def test_processes_draw_the_same_problems(tmp_path: Path) -> None:
    options, found = ["algorithm=dapo", "algorithm.keep.surplus=carry"], []
    for processes in (1, 3):
        run = tmp_path / f"{processes}"
        more = [f"hardware.processes={processes}", "hardware.timeout=120", "train.steps=4", f"hydra.run.dir={run}"]
        assert run_here(*RUN, *HALF, *options, *more) == 0
        saved: Any = load_problems(run / "checkpoints" / "step_000004")
        found.append((drawn(run), repr(saved)))
    assert found[0] == found[1]
