"""Recomputes metrics of a step from its rollout file."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

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
