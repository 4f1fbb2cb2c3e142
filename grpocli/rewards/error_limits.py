"""How many samples may fail, and what a run should hear of those that teach it nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpocli.errors import RewardError, RewardGone

if TYPE_CHECKING:
    from grpocli.rewards.score_stats import Tally
    from grpocli.rewards.scoring import Scorer


@dataclass(frozen=True, slots=True)
class Limit:
    """The share of samples that may fail, and the config key that says so."""

    key: str
    share: float

    def __str__(self) -> str:
        return f"{self.key}={self.share:g}"


def check_errors(scorer: Scorer, tally: Tally, expected: int) -> None:
    """See `Scorer.check_errors`. Tasks with their own limit one by one, the others together."""
    others = [task for task in tally.samples if task not in scorer.limits]
    together = [([task], scorer.limits[task]) for task in tally.samples if task in scorer.limits]
    for tasks, limit in [*together, (others, Limit("rollout.max_reward_errors", scorer.max_errors))]:
        samples = _total(tally, tasks)
        allowed = limit.share * samples * max(1.0, expected / max(tally.samples.total(), 1))
        for name in scorer.rewards:
            errors = sum(tally.errors[name, task] for task in tasks)
            if errors > allowed:
                lasting = errors - sum(tally.unreachable[name, task] for task in tasks)
                kind = RewardError if lasting > allowed else RewardGone
                raise kind(_failed(scorer, tally, name, tasks, f", more than {limit} allows"))


def remarks(scorer: Scorer, tally: Tally) -> dict[str, str]:
    """See `Scorer.remarks`."""
    return _bare(tally) | _silent(scorer, tally) | _tolerated(scorer, tally) | _late(scorer, tally)


def _bare(tally: Tally) -> dict[str, str]:
    samples = tally.samples
    return {
        f"bare {task}": f"no reward applies to {bare} of {samples[task]} samples of task {task}: they teach nothing"
        for task, bare in tally.bare.items()
        if bare
    }


def _silent(scorer: Scorer, tally: Tally) -> dict[str, str]:
    """Of rewards beside others: where none applies at all, that has been said."""
    found = {}
    for name, reward in scorer.rewards.items():
        tasks = [task for task in tally.samples if name in scorer.rewards_for(task)]
        silent = sum(tally.silent[name, task] for task in tasks)
        if silent == _total(tally, tasks) > sum(tally.bare[task] for task in tasks):
            found[f"silent {name}"] = (
                f"reward.{name} ({reward.label}) gave None for all {silent} samples of task {', '.join(tasks)}: "
                "it has no part in their score"
            )
    return found


def _tolerated(scorer: Scorer, tally: Tally) -> dict[str, str]:
    """What would have ended the run without a task's own limit."""
    return {
        f"errors {name} {task}": _failed(scorer, tally, name, [task], f" of task {task}, which {limit} allows")
        for task, limit in scorer.limits.items()
        for name in scorer.rewards
        if tally.errors[name, task] > scorer.max_errors * tally.samples[task]
    }


def _late(scorer: Scorer, tally: Tally) -> dict[str, str]:
    found = {}
    for (name, task), late in tally.timeouts.items():
        if late:
            samples = f"{late} of {tally.samples[task]} samples" + (f" of task {task}" if task else "")
            found[f"timeouts {name} {task}"] = (
                f"reward.{name} ({scorer.rewards[name].label}) scored {samples} as wrong because scoring them took too "
                f"long: {tally.late[name, task]}"
            )
    return found


def _failed(scorer: Scorer, tally: Tally, name: str, tasks: Collection[str], allowed: str) -> str:
    failed = sum(tally.errors[name, task] for task in tasks)
    first = next(tally.first[name, task] for task in tasks if (name, task) in tally.first)
    label = scorer.rewards[name].label
    return f"reward.{name} ({label}) could not score {failed} of {_total(tally, tasks)} samples{allowed}: {first}"


def _total(tally: Tally, tasks: Collection[str]) -> int:
    return sum(tally.samples[task] for task in tasks)
