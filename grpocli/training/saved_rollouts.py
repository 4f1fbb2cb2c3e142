"""Rollouts of the next steps in a checkpoint: leftover groups and prefetched batches.

The files hold tensors and plain values, and are read with `weights_only=True`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from grpocli.training.collector import RolloutBatch
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Status

if TYPE_CHECKING:
    from grpocli.training.collector import Collector

logger = logging.getLogger(__name__)

LEFTOVER_FILE = "carried.pt"
PREFETCHED_FILE = "ahead.pt"

Redraw: TypeAlias = Callable[[int, int | None], Prompt | None]
"""The prompt of an earlier draw, by its number and its row; None if the task has no such row."""


def save_leftover(groups: Sequence[Group], folder: Path) -> None:
    """Write leftover groups. The prompt's text and columns are left out: its draw number, the uid, and its row restore
    them.
    """
    if groups:
        torch.save([_group(group) for group in groups], folder / LEFTOVER_FILE)


def load_leftover(
    folder: Path, redraw: Redraw, group_size: int, rewards: Iterable[str], max_groups: int
) -> list[Group]:
    """The groups of `save_leftover`, equal to the bit; at most `max_groups`, so that the next step uses all of them.

    Groups that do not fit a config changed by a resume (seed, task, group size, rewards) are left out, with a warning
    in the log.
    """
    if not (folder / LEFTOVER_FILE).is_file():
        return []
    saved = torch.load(folder / LEFTOVER_FILE, weights_only=True)
    found = [_restore(group, redraw, group_size, set(rewards)) for group in saved]
    groups = [group for group in found if group][:max_groups]
    if len(groups) < len(saved):
        logger.warning("%d of %d leftover groups do not fit the changed config", len(saved) - len(groups), len(saved))
    return groups


def save_prefetched(batches: Sequence[RolloutBatch], folder: Path) -> None:
    """Write the prefetched batches, in order, with the groups for their rollout files."""
    saved = [
        {
            "groups": [_group(group) for group in batch.groups],
            "metrics": batch.metrics,
            "rest": [(str(status), _group(group)) for status, group in batch.untrained],
            "carried": sorted(batch.leftover_uids),
        }
        for batch in batches
    ]
    if saved:
        torch.save(saved, folder / PREFETCHED_FILE)


def load_prefetched(folder: Path, collector: Collector, redraw: Redraw, wanted: bool) -> list[RolloutBatch]:
    """The batches of `save_prefetched`, equal to the bit.

    Empty, with a warning in the log, if they do not fit a config changed by a resume (see `load_leftover`), or if the
    run no longer prefetches (not `wanted`). Untrained groups are left out if they do not fit: only the main process has
    them, and all processes must decide alike.
    """
    if not (folder / PREFETCHED_FILE).is_file():
        return []

    def restored(group: dict[str, Any]) -> Group | None:
        return _restore(group, redraw, collector.group_size, set(collector.reward_weights))

    saved, batches = torch.load(folder / PREFETCHED_FILE, weights_only=True), []
    for one in saved:
        groups = [group for saved_group in one["groups"] if (group := restored(saved_group))]
        rest = one["rest"] if collector.keeps_untrained else []
        untrained = [(Status(status), group) for status, saved_group in rest if (group := restored(saved_group))]
        if wanted and len(groups) == len(one["groups"]):
            batches.append(RolloutBatch(groups, one["metrics"], {}, untrained, frozenset(one["carried"])))
    if len(batches) == len(saved):
        return batches
    logger.warning("the rollouts of %d steps collected ahead do not fit the changed config", len(saved))
    return []


def _restore(saved: dict[str, Any], redraw: Redraw, size: int, names: set[str]) -> Group | None:
    prompt = redraw(int(saved["draw"]), saved.get("row"))
    if prompt is None:
        return None
    rollouts = [_rollout(prompt, r) for r in saved["rollouts"]]
    same_prompt = prompt.token_ids == saved["prompt_ids"].tolist()
    fits = same_prompt and len(rollouts) == size and all(set(r.rewards) == names for r in rollouts)
    return Group(prompt, rollouts) if fits else None


def _group(group: Group) -> dict[str, Any]:
    rollouts = [asdict(r.completion) | {"text": r.text, "rewards": r.rewards} for r in group.rollouts]
    for rollout in rollouts:
        rollout["token_ids"] = torch.tensor(rollout["token_ids"], dtype=torch.int32)
        rollout["logprobs"] = torch.tensor(rollout["logprobs"], dtype=torch.float64)
    return {
        "draw": int(group.uid),
        "row": group.prompt.row,
        "prompt_ids": torch.tensor(group.prompt.token_ids, dtype=torch.int32),
        "rollouts": rollouts,
    }


def _rollout(prompt: Prompt, saved: dict[str, Any]) -> Rollout:
    ids, logp = saved.pop("token_ids"), saved.pop("logprobs")
    text, rewards, episode = saved.pop("text"), saved.pop("rewards"), saved.pop("episode")
    done = Completion(ids.tolist(), logp.tolist(), **saved, episode=Episode(**episode) if episode else None)
    return Rollout(prompt, done, text, rewards)
