"""What another reward, or another algorithm, would have made of a recorded step."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import GrpoError, RewardError
from grpocli.rewards.scorer import Scorer
from grpocli.tasks.prompt_source import accuracy_rewards_of, rewards_for
from grpocli.tasks.task import tasks_of
from grpocli.training.collector import advantages_of, lengths_of, rewards_of
from grpocli.training.micro_batch import rows_of
from grpocli.types import Group
from grpocli_tools.replay.collection import collect_again
from grpocli_tools.replay.replay import Replay

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run
    from grpocli.types import Row
    from grpocli_tools.replay.record import RecordedGroup
    from grpocli_tools.replay.weights import Weights

SHOWN = 5
"""Completions shown on which two rewards disagree most."""
LONGEST = 80
"""Characters shown of a completion."""


def recorded_groups(replay: Replay, step: int) -> list[Group]:
    """All groups that were sampled for a step, with the recorded rewards."""
    source = replay.sources_of(replay.session_of(step)).unscored
    collected = collect_again(source, replay.recorded(step), 0)
    return collected.with_recorded_rewards(list(source.run.reward))


def other_reward(groups: Sequence[Group], replay: Replay, step: int, rewards: Mapping[str, Any]) -> dict[str, object]:
    """What other rewards say about a step's completions, beside the run's weighted sum.

    Raises RewardError if they cannot score any of them.
    """
    run = replay.session_of(step).run
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with _unlogged_errors():
        scored, stats = Scorer(dict(rewards), 1.0).score(rollouts, run.rollout.max_completion_tokens)
    error = next((one.first_error for one in stats.rewards.values() if one.first_error), "")
    if error and all(math.isnan(value) for rollout in scored for value in rollout.rewards.values()):
        raise RewardError(f"step {step}: {', '.join(rewards)} cannot score any completion; the first error: {error}")
    size = run.rollout.group_size
    new_PG = torch.tensor([[r.rewards[name] for r in scored] for name in rewards], dtype=torch.float64)
    weights = torch.tensor([[reward.weight] for reward in rewards.values()], dtype=torch.float64)
    other_PG = (new_PG * weights).nansum(0).masked_fill(new_PG.isnan().all(0), math.nan).reshape(-1, size)
    own = {name: reward.weight for name, reward in run.reward.items()}
    mine_PG = run.algorithm.scores(rewards_of(groups, list(own)), own)
    known = ~(mine_PG.isnan() | other_PG.isnan())
    mine, other = mine_PG[known], other_PG[known]
    constant = [(scores == scores[:, :1]).all(1) for scores in (mine_PG, other_PG)]
    advantage = run.algorithm.advantage
    if run.algorithm.needs_lengths:
        advantage = functools.partial(advantage, lengths_PG=lengths_of(groups, run.algorithm))
    return {
        "rewards": list(rewards),
        "mean": {
            **{name: float(values.nanmean()) for name, values in rewards_of(groups, list(own)).items()},
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


@contextmanager
def _unlogged_errors() -> Iterator[None]:
    """A block in which errors of rewards are only counted."""
    log = logging.getLogger(Scorer.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def check_rewards(rewards: Mapping[str, Any], groups: Sequence[RecordedGroup]) -> None:
    """Raise ConfigError for a reward that can score none of these groups: its code or a column is missing."""
    for reward in rewards.values():
        errors: list[GrpoError] = []
        columns = list(dict.fromkeys(tuple(group.prompt().columns) for group in groups))
        for names in columns:
            try:
                reward.check(names)
            except GrpoError as error:
                errors.append(error)
        if errors and len(errors) == len(columns):
            raise errors[0]


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


def other_algorithm(
    groups: Sequence[Group], replay: Replay, step: int, weights: Weights, other: Run
) -> dict[str, object]:
    """Advantages, loss and gradient of another run's algorithm beside the run's, on the same groups and weights.

    Both have one backward over the groups that the step trained on, in one window, and no update. The rewards are the
    recorded ones, and those that the other algorithm adds.
    """
    run, numbers = replay.session_of(step).run, [group.number for group in replay.recorded(step).trained]
    recorded = [groups[number] for number in numbers]
    added, left_out = _with_added_rewards(recorded, run, other)
    found: dict[str, dict[str, Any]] = {}
    advantages, gradients = [], []
    for name, config, trained in (("run", run, recorded), ("other", other, added)):
        one = config.algorithm
        own = {key: reward.weight for key, reward in config.reward.items() if key not in left_out}
        accuracy = [accuracy_rewards_of(config)[group.prompt.task] for group in trained]
        advantages_PG = advantages_of(trained, one, own, accuracy)
        kept_P = one.kept(rewards_of(trained, list(own)), own, accuracy)
        rows = rows_of(trained, advantages_PG, one, step)
        found[name], gradient = weights.gradient(config, rows, len(trained), step)
        found[name] |= {
            "rewards": ", ".join(f"{key} x {weight:g}" for key, weight in own.items()),
            "groups that its keep part keeps": float(kept_P.sum()),
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


def _with_added_rewards(groups: Sequence[Group], run: Run, other: Run) -> tuple[list[Group], dict[str, str]]:
    """The groups with the scores of rewards that only the other run has, and {reward: why it is left out}."""
    added, left_out = {}, {}
    for name, reward in other.reward.items():
        if name not in run.reward:
            try:
                for columns in {tuple(group.prompt.columns) for group in groups}:
                    reward.check(columns)
                added[name] = reward
            except GrpoError as error:
                left_out[name] = str(error)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    known = [name for name, reward in run.reward.items() if not reward.sees_group]
    tasks = {name: [*rewards_for(task, run.reward), *added] for name, task in tasks_of(run.task).items()}
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
