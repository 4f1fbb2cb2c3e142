"""Hydra sweepers that choose by the result of a run, its `eval/accuracy`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli.running import SMALL, finish, run_here, start
from omegaconf import OmegaConf

from grpocli.errors import Stopped

pytestmark = pytest.mark.processes


@pytest.mark.survival
def test_optuna_finds_the_best_of_its_trials(tmp_path: Path) -> None:
    sampler = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=tpe", "hydra.sweeper.sampler.seed=1"]
    study = ["hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    space = ["optim.lr=tag(log,interval(1e-4,1e-2))", "algorithm.objective.high=interval(0.1,0.4)"]
    small = [*SMALL, "train.steps=1", "eval.problems=32"]
    finish(start("train", "-m", *sampler, *study, *space, *small, f"hydra.sweep.dir={tmp_path}/sweep"), code=0)
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    reached, tried = [], []
    for folder in sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir()):
        config = OmegaConf.load(folder / "config.yaml")
        reached.append(json.loads((folder / "summary.json").read_text())["eval/accuracy"])
        tried.append((config.optim.lr, config.algorithm.objective.high))
    assert len(set(tried)) == 3
    assert all(1e-4 <= lr <= 1e-2 and 0.1 <= high <= 0.4 for lr, high in tried)
    assert math.isclose(best.best_value, max(reached))
    chosen = (best.best_params["optim.lr"], best.best_params["algorithm.objective.high"])
    assert chosen == tried[reached.index(max(reached))]


def test_a_signal_ends_the_whole_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Path] = []

    def stopped(config: object, run: object, folder: Path, *_: object, **__: object) -> None:
        runs.append(folder)
        raise Stopped("SIGTERM after step 1")

    monkeypatch.setattr("grpocli.launch.run.launch", stopped)
    assert run_here("train", "-m", "seed=1,2,3", f"hydra.sweep.dir={tmp_path}") == Stopped.exit_code
    assert runs == [tmp_path / "0"]
