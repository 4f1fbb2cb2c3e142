"""A replay of every kind of run agrees with its record, or says what it cannot check."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli.copied import config_dir
from cli.running import EVEN, SMALL, killed_after, run_here
from replay.test_replay import Grpocli, differing, replayed, trained

from grpocli_tools.replay.step_replay import VARIES

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[2]
TINY = [*SMALL[1:3], "optim.lr=3e-3", "optim.weight_decay=0.1", *EVEN]
"""Steps with something to learn, whose weights always change."""
EVERY = ["checkpoint.every=2", "checkpoint.keep=0"]


def unchecked(report: dict) -> set[str]:
    """The reasons why something is not checked."""
    return {why for step in report["steps"] for check in step["checks"] for why in check["why"]}


def assert_agrees(grpocli: Grpocli, run: Path, *options: str) -> dict:
    """Asserts that all steps agree and are checked with all their weights; returns the report."""
    code, report = replayed(grpocli, run, "--step", ":", *options)
    assert (code, differing(report)) == (0, {})
    assert all(step["from"] for step in report["steps"])
    assert "log-probs" not in " ".join(unchecked(report))
    return report


OWN_ENGINE = {"the tokens that end a completion of this engine are unknown"}


def exactly(report: dict, but: set[str] = frozenset()) -> bool:
    return all(step["exact"] for step in report["steps"]) and unchecked(report) == but


KINDS = {
    "a moving reference, several updates a step": [
        *("algorithm.kl.sync_every=2", *EVERY, "train.epochs=2", "train.minibatches=2"),
        "reward=[format,length_penalty]",
    ],
    "leftover groups": ["algorithm=dapo", "algorithm.keep.surplus=carry", "rollout.group_size=2", "train.steps=5"],
    "scripted completions": ["engine=fake", "algorithm=dapo"],
    "the sampler as old policy": [
        *("algorithm=dapo", "algorithm/correction=sampler", "train.epochs=2", "train.minibatches=2")
    ],
    "a mixture, one checkpoint": [
        *("checkpoint.every=2", "checkpoint.keep=1"),
        *("task=[arithmetic]", "+task@task.minus=arithmetic", "task.minus.operation=-", "task.arithmetic.weight=3"),
        *("task.arithmetic.rewards=[exact_match]", "task.minus.rewards=[format]", "reward=[exact_match,format]"),
    ],
    "LoRA": ["model.lora.rank=4", *EVERY],
}
DEFAULT_TIER = ("leftover groups", "a moving reference, several updates a step")


@pytest.mark.parametrize(
    "kind", [kind if kind in DEFAULT_TIER else pytest.param(kind, marks=pytest.mark.survival) for kind in KINDS]
)
def test_every_step_agrees_to_the_bit(kind: str, grpocli: Grpocli, tmp_path: Path) -> None:
    run = trained(tmp_path, *TINY, "train.steps=4", *KINDS[kind])
    assert exactly(assert_agrees(grpocli, run))


@pytest.mark.survival
def test_a_reward_of_the_group_is_checked_with_the_recorded_scores_of_others(grpocli: Grpocli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n\n"
        "def varies(completions):\n"
        "    return [os.urandom(1)[0] / 256 for _ in completions]\n\n"
        "def best(completions, scores=None):\n"
        "    return [max(scores['varies']) - one for one in scores['varies']]\n"
    )
    rewards = [f"reward=[{tmp_path}/mine.py:varies,{tmp_path}/mine.py:best]", "reward.best.per_group=true"]
    run = trained(tmp_path, *TINY[:4], *rewards, "train.steps=2")
    report = assert_agrees(grpocli, run)
    assert unchecked(report) == {VARIES}
    checks = {check["name"]: check for check in report["steps"][0]["checks"]}
    assert (checks["reward best"]["differ"], checks["reward best"]["agree"] > 0) == (0, True)


@pytest.mark.survival
def test_steps_that_were_sampled_ahead_agree(grpocli: Grpocli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    engine = config_dir(tmp_path / "conf")
    options = [*engine, "rollout.max_staleness=2", "train.steps=5", "checkpoint.every=1", "checkpoint.keep=0"]
    run = trained(tmp_path, *TINY, *options)
    assert exactly(assert_agrees(grpocli, run, *engine[:2]), but=OWN_ENGINE)
    versions = {row["version"] for row in pq.read_table(run / "rollouts" / "step_000005.parquet").to_pylist()}
    assert max(versions) < 5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("finished"), *TINY, *EVERY, "train.steps=4")


@pytest.mark.survival
def test_a_run_that_was_killed_and_resumed_agrees(finished: Path, grpocli: Grpocli, tmp_path: Path) -> None:
    """Earlier steps are replayed with the values that they had."""
    run = killed_after(2, finished, tmp_path / "run")
    code, report = replayed(grpocli, run)
    assert code == 0
    assert [step["step"] for step in report["steps"] if step["asked"]] == [2]
    assert run_here("train", f"resume={run}", "optim.lr=1e-3", "algorithm.objective.high=0.3") == 0
    assert exactly(assert_agrees(grpocli, run))


def test_without_step_the_last_whole_record_is_replayed(finished: Path, grpocli: Grpocli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "rollouts" / "step_000004.parquet"
    path.write_bytes(path.read_bytes()[:1000])
    _, out, err = grpocli("replay", str(run), code=0)
    assert "step 4 is left out" in err
    assert "step 3 replayed" in out


@pytest.mark.survival
def test_steps_before_a_replaced_part_are_refused(finished: Path, grpocli: Grpocli, tmp_path: Path) -> None:
    run = killed_after(2, finished, tmp_path / "run")
    assert run_here("train", f"resume={run}", "algorithm=dapo") == 0
    _, _, err = grpocli("replay", str(run), "--step", "1", code=2)
    assert "an earlier session had other values of algorithm" in err
    code, report = replayed(grpocli, run, "--step", "3:")
    assert (code, differing(report)) == (0, {})
