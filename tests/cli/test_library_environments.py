"""A run with an environment of the library verifiers, a step ahead, resumed exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.copied import config_dir
from cli.running import EVEN, SMALL, assert_same_run, killed_after, run_here

pytestmark = pytest.mark.processes

COUNTING = Path(__file__).parents[1] / "library_environments" / "counting_taskset.py"
PLAYED = [
    "train",
    "task=verifiers",
    f"task.env={COUNTING}",
    "task.train_size=16",
    "task.eval_size=4",
    "task.environment.turns=3",
    "task.environment.turn_tokens=6",
    "reward=[environment]",
    "rollout.max_completion_tokens=48",
    *SMALL,
    "eval.problems=2",
]


@pytest.mark.survival
def test_it_is_resumed_exactly_with_dynamic_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    engine = config_dir(tmp_path / "conf")  # samples beside the trainer, as vLLM does
    sampling = ["algorithm.keep.surplus=discard", "rollout.max_staleness=1", *engine]
    options = ["algorithm=dapo", "reward=[environment,format]", *EVEN[1:], "checkpoint.every=1", "checkpoint.keep=0"]
    whole = tmp_path / "whole"
    assert run_here(*PLAYED, *options, *sampling, "train.steps=2", f"hydra.run.dir={whole}") == 0
    killed = killed_after(1, whole, tmp_path / "killed")
    assert run_here("train", *engine[:2], f"resume={killed}") == 0
    assert_same_run(killed, whole)
