"""Dynamic sampling with leftover groups in whole runs."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from cli.running import EVEN, assert_resumes_exactly, metrics, run_here

from grpocli.runs.rollouts import read_rollouts
from grpocli.training.stream import STREAM_FILE

pytestmark = pytest.mark.processes

RUN = ["train", "algorithm=dapo", "algorithm.keep.surplus=carry", *EVEN, "model.warm_start_steps=20", "eval.problems=0"]
RUN += ["rollout.prompts_per_step=4", "rollout.group_size=2", "checkpoint.every=1", "checkpoint.keep=0"]

IN_UPDATE = {"trained", "zero_advantage", "masked"}


def recomputed(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Recomputes metrics from the rows of one rollout file, of a run with `train.epochs=1`.

    If the step sampled nothing, its metrics describe the leftover groups of the step before.
    """
    own = [row for row in rows if row["sampled_step"] == row["step"]] or rows
    groups = defaultdict(list)
    for row in own:
        groups[row["group"]].append(row["reward"])
    lengths = [row["length"] for row in own]
    known = {name: [row[name] for row in own if row[name] is not None] for name in own[0] if name.startswith("reward")}
    return {
        "reward": fmean(known.pop("reward")),
        "reward_std": fmean(stdev(scores) for scores in groups.values()),
        "frac_reward_zero_std": fmean(len(set(scores)) == 1 for scores in groups.values()),
        "completions/mean_length": fmean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(row["finish_reason"] == "length" for row in own),
        **{f"rewards/{name.removeprefix('reward/')}/mean": fmean(values) for name, values in known.items() if values},
        "sampling/kept": len({row["group"] for row in rows if row["status"] in IN_UPDATE}),
        "sampling/carried": len({row["group"] for row in rows if row["sampled_step"] < row["step"]}),
        "tokens/generated": sum(row["length"] for row in rows if row["sampled_step"] == row["step"]),
        "tokens/trained": sum(sum(row["loss_mask"]) for row in rows),
    }


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
    saved = json.loads((whole / "checkpoints" / before / STREAM_FILE).read_text())
    assert len(saved["ended"]) == carried / 2
    assert_resumes_exactly(whole, first - 1, tmp_path / "killed")
    totals = [row["num_tokens"] for row in rows]
    assert totals == sorted(totals), "of the whole run, not of a session"
    assert totals[0] < totals[-1]
    for step in range(1, 7):
        assert rollouts(tmp_path / "killed", step) == rollouts(whole, step)


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    return read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")
