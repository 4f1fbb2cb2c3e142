"""Dynamic sampling with leftover groups in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli.running import assert_same_run, killed_after, metrics, run_here
from cli.test_failures import failed
from safetensors.torch import load_file
from training.recomputed import IN_UPDATE, recomputed

from grpocli.runs.rollouts import read_rollouts
from grpocli.training.saved_rollouts import LEFTOVER_FILE

pytestmark = pytest.mark.processes

RUN = [
    "train",
    "algorithm=dapo",
    "algorithm.keep.surplus=carry",
    "reward=[format]",
    "reward.format.pattern='.*[02468]'",
    "model.warm_start_steps=20",
    "rollout.prompts_per_step=4",
    "rollout.group_size=2",
    "eval.problems=0",
    "checkpoint.every=1",
    "checkpoint.keep=0",
]


def test_leftover_groups_are_one_version_old_and_survive_a_resume(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert run_here(*RUN, "train.steps=6", f"hydra.run.dir={whole}") == 0
    rows = metrics(whole)
    carrying = [row["step"] for row in rows if row["sampling/carried"]]
    assert carrying, "a run without leftover groups shows nothing"

    for row in rows:
        for name, value in recomputed(rollouts(whole, row["step"])).items():
            assert row[name] == pytest.approx(value), name

    first = carrying[0]
    trained = [row for row in rollouts(whole, first) if row["status"] in IN_UPDATE]
    computed = [row for row in trained if row["status"] == "trained"]
    assert all(len(row["trainer_logprobs"]) == len(row["entropies"]) == row["length"] for row in computed)
    versions = [row["version"] for row in trained]
    carried = int(2 * rows[first - 1]["sampling/carried"])
    assert versions == [first - 1] * carried + [first] * (len(trained) - carried)
    assert rows[first - 1]["weight_version"] == first

    before = f"step_{first - 1:06d}"
    saved = torch.load(whole / "checkpoints" / before / LEFTOVER_FILE, weights_only=True)
    assert len(saved) == carried / 2
    killed = killed_after(first - 1, whole, tmp_path / "killed")
    assert run_here("train", f"resume={killed}") == 0
    assert_same_run(killed, whole)
    totals = [row["num_tokens"] for row in rows]
    assert totals == sorted(totals), "of the whole run, not of a session"
    assert totals[0] < totals[-1]
    for step in range(1, 7):
        assert rollouts(killed, step) == rollouts(whole, step)


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    return read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")


def test_a_damaged_leftover_group_gives_a_one_sentence_error(grpocli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_here(*RUN, "train.steps=1", f"hydra.run.dir={run}") == 0
    (run / "checkpoints" / "step_000001" / LEFTOVER_FILE).write_bytes(b"half a file")
    code, said = failed(grpocli, "train", f"resume={run}", "train.steps=2")
    assert code == 2
    assert f"damaged ({LEFTOVER_FILE} differs from what was written)" in said


@pytest.mark.survival
def test_sharded_processes_have_the_same_leftover_groups(tmp_path: Path) -> None:
    """Both processes hold half of the model, and each samples until its own completions end."""
    runs = []
    for options in ((), ("hardware.processes=2", "hardware.parallel=fsdp2", "hardware.timeout=120")):
        run = tmp_path / f"{len(options)}"
        assert run_here(*RUN, *options, "train.steps=3", f"hydra.run.dir={run}") == 0
        runs.append(run)
    names = ("reward", "loss", "grad_norm", "entropy", "tokens/trained", "sampling/carried", "sampling/rounds")
    for one, two in zip(*map(metrics, runs), strict=True):
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    one, two = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() <= 1e-4 for name in one)
