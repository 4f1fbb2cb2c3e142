"""Groups kept for the next step, as JSON in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from grpocli.data import Completion, Group, Prompt, Rollout


def to_json(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Everything but the prompt, which the number of its draw, its uid, brings back."""
    return [
        {
            "draw": int(group.uid),
            "rollouts": [
                {"completion": asdict(r.completion), "text": r.text, "rewards": r.rewards} for r in group.rollouts
            ],
        }
        for group in groups
    ]


def from_json(saved: Sequence[dict[str, Any]], draw: Callable[[int], Prompt]) -> list[Group]:
    """The groups again, equal to the bit. Raises KeyError or TypeError for what `to_json` did not write."""
    groups = []
    for one in saved:
        prompt = draw(one["draw"])
        rollouts = [
            Rollout(prompt, Completion(**r["completion"]), r["text"], dict(r["rewards"])) for r in one["rollouts"]
        ]
        groups.append(Group(prompt, rollouts))
    return groups
