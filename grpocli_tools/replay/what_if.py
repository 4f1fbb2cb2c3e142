"""What another reward, or another algorithm, would have made of a recorded step."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import GrpoError, RewardError
from grpocli.rewards.scorer import Scorer
from grpocli.tasks.prompt_source import accuracy_rewards_of, rewards_for
from grpocli.training.collector import advantages_of, lengths_of, rewards_of
from grpocli.training.packing import rows_of
from grpocli.types import Group
from grpocli_tools.replay.collection import collect_again
from grpocli_tools.replay.replay import Replay

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run
    from grpocli.types import Row
    from grpocli_tools.replay.collection import RecordedStep
    from grpocli_tools.replay.weights import Weights

SHOWN = 5
"""Completions shown on which two rewards disagree most."""
LONGEST = 80
"""Characters shown of a completion."""


def columns_of(recorded: RecordedStep) -> list[str]:
    """The columns that some example of a step has."""
    return list(dict.fromkeys(name for group in recorded.groups for name in group.prompt().columns))


def recorded_groups(replay: Replay, step: int) -> list[Group]:
    """All groups that were sampled for a step, with the recorded rewards."""
    return collect_again(replay.source_of(step), replay.recorded(step)).groups


def other_reward(groups: Sequence[Group], run: Run, step: int, rewards: Mapping[str, Any]) -> dict[str, object]:
    """What other rewards say about a step's completions, beside the run's weighted sum.

    Raises RewardError if they cannot score any of them.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored, stats = Scorer(dict(rewards), 1.0).score(rollouts, run.rollout.max_completion_tokens)
    error = next((one.first_error for one in stats.rewards.values() if one.first_error), "")
    new_PG = torch.tensor([[r.rewards[name] for r in scored] for name in rewards], dtype=torch.float64)
    if error and new_PG.isnan().all():
        raise RewardError(f"step {step}: {', '.join(rewards)} cannot score any completion; the first error: {error}")
    weights = torch.tensor([[reward.weight] for reward in rewards.values()], dtype=torch.float64)
    other_PG = (new_PG * weights).nansum(0).masked_fill(new_PG.isnan().all(0), math.nan).reshape(len(groups), -1)
    own = {name: reward.weight for name, reward in run.reward.items()}
    recorded = rewards_of(groups, list(own))
    mine_PG = run.algorithm.scores(recorded, own)
    known = ~(mine_PG.isnan() | other_PG.isnan())
    mine, other = mine_PG[known], other_PG[known]
    constant = [(scores == scores[:, :1]).all(1) for scores in (mine_PG, other_PG)]
    advantage = run.algorithm.advantage
    if run.algorithm.needs_lengths:
        advantage = functools.partial(advantage, lengths_PG=lengths_of(groups, run.algorithm))
    return {
        "rewards": list(rewards),
        "mean": {
            **{name: float(values.nanmean()) for name, values in recorded.items()},
            **{f"{name} (other)": float(values.nanmean()) for name, values in zip(rewards, new_PG, strict=True)},
        },
        "not scored": int(other_PG.isnan().sum()),
        **({"first error": error} if error else {}),
        "equal": int((mine == other).sum()),
        "higher": int((other > mine).sum()),
        "lower": int((other < mine).sum()),
        "correlation of advantages": _correlation(*(advantage(scores)[known] for scores in (mine_PG, other_PG))),
        "groups that become informative": int((constant[0] & ~constant[1]).sum()),
        "groups that become uninformative": int((~constant[0] & constant[1]).sum()),
        "largest disagreements": _largest(groups, mine_PG, other_PG),
    }


def _largest(groups: Sequence[Group], mine_PG: Tensor, other_PG: Tensor) -> list[dict[str, object]]:
    """The completions on which the rewards disagree most."""
    gap_N = (mine_PG - other_PG).abs().nan_to_num().flatten()
    found: list[dict[str, object]] = []
    for place in gap_N.argsort(descending=True, stable=True)[:SHOWN].tolist():
        p, g = divmod(place, mine_PG.shape[1])
        if gap_N[place] > 0:
            values = {"recorded": float(mine_PG[p, g]), "other": float(other_PG[p, g])}
            text = groups[p].rollouts[g].text[:LONGEST]
            found.append({"group": p, "completion": g, "uid": groups[p].uid, **values, "text": text})
    return found


def _correlation(one: Tensor, other: Tensor) -> float | None:
    """Pearson's; None if one of them is constant."""
    if len(one) < 2 or not (one.std() > 0 and other.std() > 0):
        return None
    return float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])


def other_algorithm(groups: Sequence[Group], run: Run, step: int, weights: Weights, other: Run) -> dict[str, object]:
    """Advantages, loss and gradient of another run's algorithm beside the run's, on the same groups and weights.

    groups: those that the step trained on, with the recorded rewards; those that the other algorithm adds are scored.
    Both have one backward in one window, and no update.
    """
    added, left_out = _with_added_rewards(groups, run, other)
    found: dict[str, dict[str, Any]] = {}
    advantages, gradients = [], []
    for name, config, trained in (("run", run, groups), ("other", other, added)):
        one = config.algorithm
        own = {key: reward.weight for key, reward in config.reward.items() if key not in left_out}
        accuracy = [accuracy_rewards_of(config)[group.prompt.task] for group in trained]
        advantages_PG = advantages_of(trained, one, own, accuracy)
        rows = rows_of(trained, advantages_PG, one, step)
        found[name], gradient = weights.gradient(config, rows, len(trained), step)
        found[name] |= {
            "rewards": ", ".join(f"{key} x {weight:g}" for key, weight in own.items()),
            "groups that its keep part keeps": float(one.kept(rewards_of(trained, list(own)), own, accuracy).sum()),
            "mean |advantage|": float(advantages_PG.abs().mean()),
            "share of tokens with a gradient": _share(one, rows),
        }
        advantages.append(advantages_PG.flatten())
        gradients.append(gradient)
    return {
        **found,
        **({"rewards of the other algorithm that are left out": left_out} if left_out else {}),
        "correlation of advantages": _correlation(*advantages),
        "cosine of the gradients": float(torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0)),
    }


def _with_added_rewards(groups: Sequence[Group], run: Run, other: Run) -> tuple[Sequence[Group], dict[str, str]]:
    """The groups with the scores of rewards that only the other run has, and {reward: why it is left out}."""
    added, left_out = {}, {}
    columns = list(dict.fromkeys(name for group in groups for name in group.prompt.columns))
    for name in [name for name in other.reward if name not in run.reward]:
        try:
            other.reward[name].check(columns)
            added[name] = other.reward[name]
        except GrpoError as error:
            left_out[name] = str(error)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    known = [name for name, reward in run.reward.items() if not reward.sees_group]
    tasks = {name: [*rewards_for(task, run.reward), *added] for name, task in run.tasks.items()}
    scored, _ = Scorer(added, 1.0, tasks).score(rollouts, run.rollout.max_completion_tokens, known=known)
    scores = iter(scored)
    return [
        Group(group.prompt, [replace(r, rewards=r.rewards | next(scores).rewards) for r in group.rollouts])
        for group in groups
    ], left_out


def _share(algorithm: Algorithm, rows: Sequence[Row]) -> float:
    """The share of the model's tokens whose loss has a gradient."""
    counted = [sum(row.mask) * (row.advantage != 0 or not algorithm.zero_at_zero_advantage) for row in rows]
    return sum(counted) / max(1, sum(len(row.completion_ids) for row in rows))
