"""Groups kept for the next steps, in a checkpoint: tensors and plain values, without pickled code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch

from grpocli.data import Completion, Episode, Group, Prompt, Rollout

logger = logging.getLogger(__name__)

CARRIED = "carried.pt"
AHEAD = "ahead.pt"

Step: TypeAlias = tuple[Sequence[Group], dict[str, float]]  # what has been collected for a step, and its metrics


def save(groups: Sequence[Group], folder: Path) -> None:
    """Everything but the prompt's text and columns, which the number of its draw, its uid, brings back."""
    if groups:
        torch.save([_group(group) for group in groups], folder / CARRIED)


def load(
    folder: Path, draw: Callable[[int], Prompt], group_size: int, rewards: Iterable[str], most: int
) -> list[Group]:
    """The groups again, equal to the bit; at most a step's worth, so that none waits for another step.

    Groups that do not fit a config that a resume has changed (seed, task, group size, rewards) are left out, and the
    log says so. Raises ValueError where a completion is damaged, and what torch.load raises.
    """
    if not (folder / CARRIED).is_file():
        return []
    saved = torch.load(folder / CARRIED, weights_only=True)
    names = set(rewards)
    groups = [group for one in saved if (group := _restored(one, draw, group_size, names))][:most]
    if len(groups) < len(saved):
        logger.warning("%d of %d carried groups do not fit the config now", len(saved) - len(groups), len(saved))
    return groups


def save_steps(steps: Sequence[Step], folder: Path) -> None:
    """Whole steps that have been collected ahead, in order."""
    if steps:
        saved = [{"groups": [_group(group) for group in groups], "metrics": metrics} for groups, metrics in steps]
        torch.save(saved, folder / AHEAD)


def load_steps(
    folder: Path, draw: Callable[[int], Prompt], group_size: int, rewards: Iterable[str], wanted: bool
) -> list[Step]:
    """The steps again, equal to the bit; none of them, and a word in the log, where a resume has changed the config so
    that groups do not fit (as in `load`), or so that no step is collected ahead (not `wanted`).
    """
    if not (folder / AHEAD).is_file():
        return []
    saved = torch.load(folder / AHEAD, weights_only=True)
    names = set(rewards)
    steps = [([_restored(one, draw, group_size, names) for one in step["groups"]], step["metrics"]) for step in saved]
    whole = [([group for group in groups if group], metrics) for groups, metrics in steps]
    if wanted and all(len(some) == len(groups) for (some, _), (groups, _) in zip(whole, steps, strict=True)):
        return [(groups, metrics) for groups, metrics in whole]
    logger.warning("the rollouts of %d steps collected ahead do not fit the config now", len(saved))
    return []


def _restored(saved: dict[str, Any], draw: Callable[[int], Prompt], size: int, names: set[str]) -> Group | None:
    prompt = draw(int(saved["draw"]))
    rollouts = [_rollout(prompt, r) for r in saved["rollouts"]]
    same_prompt = prompt.token_ids == saved["prompt_ids"].tolist()
    fits = same_prompt and len(rollouts) == size and all(set(r.rewards) == names for r in rollouts)
    return Group(prompt, rollouts) if fits else None


def _group(group: Group) -> dict[str, Any]:
    rollouts = [asdict(r.completion) | {"text": r.text, "rewards": r.rewards} for r in group.rollouts]
    for one in rollouts:
        one["token_ids"] = torch.tensor(one["token_ids"], dtype=torch.int32)
        one["logprobs"] = torch.tensor(one["logprobs"], dtype=torch.float64)
    return {
        "draw": int(group.uid),
        "prompt_ids": torch.tensor(group.prompt.token_ids, dtype=torch.int32),
        "rollouts": rollouts,
    }


def _rollout(prompt: Prompt, saved: dict[str, Any]) -> Rollout:
    ids, logp = saved.pop("token_ids"), saved.pop("logprobs")
    if ids.shape != logp.shape or not logp.isfinite().all():
        raise ValueError("a carried completion has not one finite log-prob a token")
    text, rewards, episode = saved.pop("text"), saved.pop("rewards"), saved.pop("episode", None)
    done = Completion(ids.tolist(), logp.tolist(), **saved, episode=Episode(**episode) if episode else None)
    return Rollout(prompt, done, text, rewards)
