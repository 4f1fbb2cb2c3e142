"""Whole runs with engine=fake: dynamic sampling, episodes, a resume to the bit, and two processes as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.running import SMALL, assert_same_run, killed_after, metrics, run_here
from cli.test_environment_run import TWO

from grpocli.rollout.fake_engine import FakeEngine
from grpocli.training.update import Updater

pytestmark = pytest.mark.processes

RUN = [*TWO, *SMALL, "engine=fake", "algorithm=dapo", "checkpoint.every=1", "checkpoint.keep=0", "eval.problems=0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("fake") / "run"
    assert run_here(*RUN, f"hydra.run.dir={run}") == 0
    return run


def test_the_policy_scores_and_learns_the_texts(whole: Path) -> None:
    rows = metrics(whole)
    assert all(row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert sum(row["sampling/rounds"] for row in rows) > len(rows), "groups of equal texts are sampled again"
    assert any(row["completions/mean_turns"] > 1 for row in rows)


def test_a_resume_equals_never_having_stopped(whole: Path, tmp_path: Path) -> None:
    killed = killed_after(1, whole, tmp_path / "killed")
    assert run_here("train", f"resume={killed}") == 0
    assert_same_run(killed, whole)


def test_the_engine_releases_memory_before_the_updates_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*given: Any, **others: Any) -> Any:
            called.append(name)
            return plain(*given, **others)

        monkeypatch.setattr(owner, name, call)

    noted(FakeEngine, "generate")
    noted(FakeEngine, "release_memory")
    noted(Updater, "train_step")
    options = ["engine=fake", "train.steps=2", "eval.problems=0"]
    assert run_here("train", *SMALL, *options, f"hydra.run.dir={tmp_path}/run") == 0
    assert called == ["generate", "release_memory", "train_step"] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["rollout.max_staleness=1"], "rollout.max_staleness=1: engine=fake does not sample beside the trainer"),
        (["rollout.regex=a"], "rollout.regex=a: engine=fake cannot constrain completions"),
        (["engine.completions=[]"], "engine.completions=[]: needs at least one text"),
        (["engine.function=nowhere.py:write"], "nowhere.py: there is no such file"),
    ],
)
def test_wrong_settings_give_a_one_sentence_error(grpocli, options: list[str], said: str) -> None:
    code, _, err = grpocli("train", "engine=fake", *options)
    assert code == 2
    assert said in err
