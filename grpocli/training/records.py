"""The rows of a step's rollout file: every completion, and whether it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from grpocli.tracking.rollouts import Record
from grpocli.training.collect import rewards_of
from grpocli.types import Status

if TYPE_CHECKING:
    from grpocli.algorithm import Algorithm
    from grpocli.training.collect import Collected
    from grpocli.training.row import Row


def records_of(
    collected: Collected, rows: Sequence[Row], algorithm: Algorithm, weights: dict[str, float], step: int
) -> list[Record]:
    """A record for each completion: first those of the update, in its order, then the others.

    rows: of `collected.groups`, after the update. step: its number, from 1.
    """
    outcomes = [*((Status.TRAINED, group) for group in collected.groups), *collected.rest]
    if not outcomes:
        return []
    scores_PG = algorithm.scores(rewards_of([group for _, group in outcomes], list(weights)), weights)
    records = [
        Record(rollout, number, status, step - (group.uid in collected.leftover), score)
        for number, ((status, group), scores) in enumerate(zip(outcomes, scores_PG.tolist(), strict=True))
        for rollout, score in zip(group.rollouts, scores, strict=True)
    ]
    updated = [_updated(record, row, algorithm) for record, row in zip(records, rows, strict=False)]
    return [*updated, *records[len(rows) :]]


def _updated(record: Record, row: Row, algorithm: Algorithm) -> Record:
    """The record of a completion that was in the update, with its row's status, advantage, mask and values."""
    return replace(
        record,
        status=status_of(row, algorithm),
        advantage=row.advantage,
        loss_mask=row.mask,
        logp=None if row.logp is None else row.logp.numpy(),
        entropy=None if row.entropy is None else row.entropy.numpy(),
    )


def status_of(row: Row, algorithm: Algorithm) -> Status:
    """The status of a row that is in an update."""
    if not any(row.mask):
        return Status.MASKED
    return Status.ZERO_ADVANTAGE if row.advantage == 0 and algorithm.vanishes else Status.TRAINED
