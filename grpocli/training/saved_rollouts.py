"""Rollouts of the next steps in a checkpoint: leftover groups and batches collected ahead.

The files hold tensors and plain values, and are read with `weights_only=True`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.training.collector import RolloutBatch
from grpocli.types import Completion, Episode, Group, Prompt, Rollout, Status

if TYPE_CHECKING:
    from grpocli.training.collector import Collector

logger = logging.getLogger(__name__)

CARRIED = "carried.pt"
AHEAD = "ahead.pt"


def save(groups: Sequence[Group], folder: Path) -> None:
    """Write leftover groups. The prompt's text and columns are left out: its draw number, the uid, restores them."""
    if groups:
        torch.save([_group(group) for group in groups], folder / CARRIED)


def load(
    folder: Path, draw: Callable[[int], Prompt], group_size: int, rewards: Iterable[str], max_groups: int
) -> list[Group]:
    """The groups of `save`, equal to the bit; at most `max_groups`, so that the next step uses all of them.

    Groups that do not fit a config changed by a resume (seed, task, group size, rewards) are left out, with a warning
    in the log. Raises ValueError if a completion is damaged, and the errors of torch.load.
    """
    if not (folder / CARRIED).is_file():
        return []
    saved = torch.load(folder / CARRIED, weights_only=True)
    names = set(rewards)
    groups = [group for saved_group in saved if (group := _restored(saved_group, draw, group_size, names))][:max_groups]
    if len(groups) < len(saved):
        logger.warning("%d of %d carried groups do not fit the changed config", len(saved) - len(groups), len(saved))
    return groups


def save_steps(steps: Sequence[RolloutBatch], folder: Path) -> None:
    """Write the batches collected ahead, in order, with the groups for their rollout files."""
    if steps:
        torch.save([_step(step) for step in steps], folder / AHEAD)


def load_steps(folder: Path, collector: Collector, wanted: bool) -> list[RolloutBatch]:
    """The batches of `save_steps`, equal to the bit.

    Empty, with a warning in the log, if they do not fit a config changed by a resume (see `load`), or if no steps are
    collected ahead any more (not `wanted`).
    """
    if not (folder / AHEAD).is_file():
        return []
    saved = torch.load(folder / AHEAD, weights_only=True)
    steps = [step for saved_step in saved if (step := _restored_step(saved_step, collector))]
    if wanted and len(steps) == len(saved):
        return steps
    logger.warning("the rollouts of %d steps collected ahead do not fit the changed config", len(saved))
    return []


def _step(step: RolloutBatch) -> dict[str, Any]:
    return {
        "groups": [_group(group) for group in step.groups],
        "metrics": step.metrics,
        "rest": [(str(status), _group(group)) for status, group in step.rest],
        "carried": sorted(step.leftover),
    }


def _restored_step(saved: dict[str, Any], collector: Collector) -> RolloutBatch | None:
    """The batch; None if a group to train on does not fit the config.

    `rest` does not count: only the main process has it, and all processes must decide alike.
    """

    def restored(group: dict[str, Any]) -> Group | None:
        return _restored(group, collector.draw, collector.group_size, set(collector.weights))

    groups = [group for saved_group in saved["groups"] if (group := restored(saved_group))]
    if len(groups) < len(saved["groups"]):
        return None
    left = saved.get("rest", []) if collector.keeps_rest else []
    rest = [(Status(status), group) for status, saved_group in left if (group := restored(saved_group))]
    if len(rest) < len(left):
        logger.warning(
            "%d of %d groups of a rollout file do not fit the changed config", len(left) - len(rest), len(left)
        )
    return RolloutBatch(
        groups,
        saved["metrics"],
        rest=rest,
        leftover=frozenset(saved.get("carried", ())),
    )


def _restored(saved: dict[str, Any], draw: Callable[[int], Prompt], size: int, names: set[str]) -> Group | None:
    prompt = draw(int(saved["draw"]))
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
        "prompt_ids": torch.tensor(group.prompt.token_ids, dtype=torch.int32),
        "rollouts": rollouts,
    }


def _rollout(prompt: Prompt, saved: dict[str, Any]) -> Rollout:
    ids, logp = saved.pop("token_ids"), saved.pop("logprobs")
    if ids.shape != logp.shape or not logp.isfinite().all():
        raise ValueError("a carried completion does not have one finite log-prob for each token")
    text, rewards, episode = saved.pop("text"), saved.pop("rewards"), saved.pop("episode", None)
    done = Completion(ids.tolist(), logp.tolist(), **saved, episode=Episode(**episode) if episode else None)
    return Rollout(prompt, done, text, rewards)
