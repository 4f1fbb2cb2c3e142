"""One step computed again and compared with its record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpocli.algorithm.metrics import gap_metrics
from grpocli.progress import UNWATCHED, Progress
from grpocli.rewards.reward import answer_columns
from grpocli.runs.metrics import json_line
from grpocli.runs.rollouts import rollout_table
from grpocli.training.build_trainer import make_collector
from grpocli.training.collector import RolloutBatch, records_of
from grpocli.training.micro_batch import group_spans, rows_of
from grpocli.types import Group, Row, Status
from grpocli_tools.replay import checks as limits
from grpocli_tools.replay.checks import Check, Columns, Difference, close, compare_rows
from grpocli_tools.replay.collection import FEW, CollectedStep, collect_again
from grpocli_tools.replay.record import RecordedStep
from grpocli_tools.replay.sampler_check import SamplerCheck
from grpocli_tools.replay.source import Sources
from grpocli_tools.replay.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.training.collector import Collector

COLUMNS = (
    Columns("prompts", ("task", "uid", "prompt", "messages", "answer", "columns", "prompt_ids")),
    Columns("tokens", ("completion_ids",), per_token=True),
    Columns("texts", ("completion", "episode", "turns")),
    Columns("lengths and masks", ("length", "loss_mask")),
    Columns("finish reasons", ("finish_reason",)),
    Columns("status", ("step", "sampled_step", "group", "status")),
    Columns("weight versions", ("version", "version_spans")),
)
"""Checks of columns that need neither rewards nor weights."""
WEIGHT_COLUMNS = {
    "trainer log-probs": "trainer_logprobs",
    "entropies": "entropies",
    "ratios": "ratios",
    "clipped": "clipped",
}
"""Checks of columns that the update computes."""
VARIES = "the reward cannot be repeated: two calls with the same completions gave different scores"
MAY_VARY = (
    "reward {name} gave the same scores in two calls now, so a difference is a changed record, a changed reward, or a "
    "reward that depends on what it scored before"
)
DEALT = ("tokens/padding", "tokens/shared")
"""Metrics that depend on the rows that each process gets."""
NOT_REPEATED = ("curriculum/", "time/", "sync/", "eval/", "memory/", "engine/")
"""Prefixes of metrics that do not follow from a step's rollouts and weights."""


@dataclass
class StepReplay:
    """Computes a step again. weights: before the step, which `checks` trains on; None: see `no_weights`.

    before: the metrics of the step before, for running totals. exact: whether the log-probs are equal to the bit.
    """

    recorded: RecordedStep
    sources: Sources
    weights: Weights | None
    no_weights: str
    before: Mapping[str, Any] | None
    progress: Progress
    exact: bool | None = None
    notes: list[str] = field(default_factory=list)

    def checks(self, thorough: bool) -> list[Check]:
        """All checks. thorough: call the rewards, and score the completions that the update did not compute."""
        recorded, run = self.recorded, self.sources.source.run
        source = self.sources.source if thorough else self.sources.unscored
        collected = collect_again(source, recorded, self._draws())
        old = collected.with_recorded_rewards(list(run.reward))
        reward_checks, collected = self._reward_checks(collected) if thorough else ([], collected)
        trained = [old[group.number] for group in recorded.trained]
        advantages = self._advantages(collected, trained)
        rows = rows_of(trained, advantages, run.algorithm, recorded.step)
        sampler = SamplerCheck(recorded, source, self.weights, self.no_weights, self.progress)
        logp = sampler.logp_before_update(rows, old) if thorough else {}
        metrics = self.weights.train(rows, len(trained)) if self.weights else {}
        expected = self._expected_rows(collected, old, rows)
        found = [*self._column_checks(expected, collected, thorough), *self._advantage_checks(collected, thorough)]
        found += [self._selection(collected), *reward_checks, *self._update_checks(expected)]
        if thorough:
            found.append(sampler.check(rows, old, logp))
        found += [self._record_metrics(rows), *self._metric_checks(collected, metrics, thorough)]
        return [check for check in found if check.agree or check.differ or check.why]

    def _draws(self) -> int:
        """The prompts drawn before the step."""
        numbers = [int(g.uid) for g in self.recorded.groups if not g.is_leftover and g.uid.isdigit()]
        return min(numbers, default=0)

    @cached_property
    def _collector(self) -> Collector:
        """A collector that only computes advantages."""
        source = self.sources.source
        sampler: Any = source  # it only needs `world`
        return make_collector(
            source.run, sampler, lambda number: self.recorded.groups[number].prompt(), 0, [], UNWATCHED
        )

    # What the step trained on

    def _advantages(self, collected: CollectedStep, trained: Sequence[Group]) -> Tensor:
        """The advantages that the step trained on: those of the rewards that fit the recorded ones best, or these.

        So one damaged reward or advantage does not change the weights of later steps.
        """
        again = [collected.groups[group.number] for group in self.recorded.trained]
        rows_PG = [[row["advantage"] for row in group.rows] for group in self.recorded.trained]
        recorded_PG = torch.tensor([[math.nan if one is None else one for one in row_G] for row_G in rows_PG])
        candidates = [self._collector.advantages(groups) for groups in (trained, again)]
        wrong = [int((~_alike(recorded_PG, self._used(candidate, trained))).sum()) for candidate in candidates]
        best = min(range(2), key=lambda i: wrong[i])
        if wrong[best] <= FEW * recorded_PG.numel():
            return candidates[best]
        factors_P1 = torch.tensor([[group.prompt.loss_multiplier] for group in trained], dtype=torch.float64)
        return recorded_PG.double().nan_to_num() / factors_P1.where(factors_P1 != 0, 1.0)

    def _used(self, advantages_PG: Tensor, groups: Sequence[Group]) -> Tensor:
        """Advantages as the file has them: with the prompts' loss multipliers, in float32."""
        factors = [[group.prompt.loss_multiplier] for group in groups]
        return (advantages_PG * torch.tensor(factors, dtype=torch.float64).reshape(-1, 1)).float()

    def _expected_rows(
        self, collected: CollectedStep, old: Sequence[Group], rows: Sequence[Row]
    ) -> list[dict[str, Any]]:
        """The rows that the step's rollout file should have, in the file's order."""
        source, groups = self.sources.source, self.recorded.groups
        order = sorted(groups, key=lambda group: not group.in_update)
        statuses = {group.uid: status for status, group in collected.batch.untrained} if collected.batch else {}
        batch = RolloutBatch(
            [old[group.number] for group in order if group.in_update],
            {},
            untrained=[(statuses.get(g.uid, g.status), old[g.number]) for g in order if not g.in_update],
            leftover_uids=frozenset(group.uid for group in groups if group.is_leftover),
        )
        records = records_of(batch, rows, source.run.algorithm, source.weights, self.recorded.step)
        found = rollout_table(records, self.recorded.step, answer_columns(source.run.reward.values())).to_pylist()
        size = source.run.rollout.group_size
        place = {group.number: i for i, group in enumerate(order)}
        return [row for group in groups for row in found[place[group.number] * size : (place[group.number] + 1) * size]]

    # Checks of the file's columns

    def _compared(self, spec: Columns, expected: Sequence[dict[str, Any]]) -> Check:
        size = self.sources.source.run.rollout.group_size
        return compare_rows(self.recorded.step, spec, self.recorded.rows, expected, size, self._token_text)

    def _token_text(self, token: int) -> str:
        return str(self.sources.source.tokenizer.decode([token]))

    def _column_checks(
        self, expected: Sequence[dict[str, Any]], collected: CollectedStep, thorough: bool
    ) -> list[Check]:
        found = []
        for spec in COLUMNS:
            if spec.name == "prompts" and not collected.drawn:
                why = self.sources.no_prompts or "most prompts differ from the task's data, which has changed"
                found.append(spec.skipped(f"not drawn again: {why}", len(expected)))
                spec = replace(spec, name="prompts in their group")
            if spec.name == "finish reasons" and not self.sources.source.end_ids:
                why = "the tokens that end a completion of this engine are unknown"
                found.append(spec.skipped(why, len(expected)))
                continue
            found.append(self._compared(spec, expected))
        tolerance = limits.SUM_TOLERANCE
        return [*found, self._compared(Columns("sum of rewards", ("reward",), tolerance, 1e-9), expected)]

    def _reward_checks(self, collected: CollectedStep) -> tuple[list[Check], CollectedStep]:
        """The rewards computed again, by name; the step with the recorded values of those that cannot be repeated.

        Rewards that see the group come last, since they get the scores of the others.
        """
        found: list[Check] = []
        varying: list[str] = []
        source = self.sources.source
        for name in sorted(source.run.reward, key=source.scorer.sees_group):
            if why := self.sources.skipped.get(name):
                check = Check(f"reward {name}")
                check.skip(f"not called again: {why}", len(self.recorded.rows))
            else:
                if source.scorer.sees_group(name):
                    collected = collected.with_recorded(varying)
                    collected = collected.with_scores(name, collected.scored_again(source, name))
                check = self._reward_check(name, collected.groups)
                if check.differ and self._varies(name, collected):
                    varying.append(name)
                    check.excuse(VARIES)
                elif check.differ and check.agree:
                    self.notes.append(f"step {self.recorded.step}: {MAY_VARY.format(name=name)}")
            found.append(check)
        return found, collected.with_recorded(varying)

    def _reward_check(self, name: str, groups: Sequence[Group]) -> Check:
        column = f"reward/{name}"
        values = [_none(rollout.rewards[name]) for group in groups for rollout in group.rollouts]
        spec = Columns(f"reward {name}", (column,), limits.SUM_TOLERANCE, 1e-9)
        return self._compared(spec, [{column: value} for value in values])

    def _varies(self, name: str, collected: CollectedStep) -> bool:
        """Whether another call of a reward gives other scores: it draws random numbers, or keeps a state."""
        again = collected.scored_again(self.sources.source, name)
        pairs = [(r.rewards[name], again[i]) for i, r in enumerate(r for g in collected.groups for r in g.rollouts)]
        return any(not close(_none(one), _none(other), limits.SUM_TOLERANCE, 1e-9) for one, other in pairs)

    def _advantage_checks(self, collected: CollectedStep, thorough: bool) -> list[Check]:
        """Advantages of the recorded rewards, and of those computed again, against the file's."""
        numbers = [group.number for group in self.recorded.trained]
        old = collected.with_recorded_rewards(list(self.sources.source.run.reward))
        sources = {"advantages": old} | ({"advantages of the rewards again": collected.groups} if thorough else {})
        found = []
        for name, groups in sources.items():
            trained = [groups[p] for p in numbers]
            used_PG = self._used(self._collector.advantages(trained), trained)
            by_group = dict(zip(numbers, used_PG.tolist(), strict=True))
            size = self.sources.source.run.rollout.group_size
            rows = [{"advantage": v} for g in self.recorded.groups for v in by_group.get(g.number, [None] * size)]
            found.append(self._compared(Columns(name, ("advantage",), limits.SUM_TOLERANCE, 1e-6), rows))
        return found

    def _selection(self, collected: CollectedStep) -> Check:
        """The groups that were kept and dropped, by the recorded rewards, in their order."""
        check, groups = Check("selection of groups", "groups"), self.recorded.groups
        if collected.batch is None:
            difference = Difference(self.recorded.step, "selection", "as in the file", collected.problem)
            check.compare(difference, same=False)
            return check
        outcomes = [(Status.TRAINED, group) for group in collected.batch.groups] + collected.batch.untrained
        expected = {group.uid: str(status) for status, group in outcomes}
        for group in groups:
            new = expected.get(group.uid, "not sampled")
            difference = Difference(self.recorded.step, "selection", str(group.status), new, group.number)
            check.compare(difference, same=str(group.status) == new)
        if not check.differ and [group.uid for group in groups] != list(expected):
            order = "another order"
            check.compare(Difference(self.recorded.step, "selection", "order of the file", order), same=False)
        return check

    # Checks of the update

    def _update_checks(self, expected: Sequence[dict[str, Any]]) -> list[Check]:
        """Log-probs, entropies, ratios and clipped tokens of the update."""
        if self.weights is None:
            return [self._without_weights(name, column) for name, column in WEIGHT_COLUMNS.items()]
        tolerance = limits.LOGP_TOLERANCE[self.weights.dtype]
        found = []
        for name, column in WEIGHT_COLUMNS.items():
            spec = Columns(name, (column,), 0.0 if column != "ratios" else tolerance, tolerance, per_token=True)
            check = self._compared(spec, expected)
            if self.exact is None and check.agree + check.differ:
                unequal = check.rounded + check.differ
                self.exact = unequal <= max(1, (1 - limits.EXACT_SHARE) * (check.agree + check.differ))
            if self.exact and check.rounded:
                check = self._compared(replace(spec, relative=0.0, absolute=0.0), expected)
            elif column == "clipped" and check.differ and not self.exact:
                check.excuse("rounding may move a token across the limit")
            found.append(check)
        return found

    def _without_weights(self, name: str, column: str) -> Check:
        check = Check(name, "tokens")
        check.skip(self.no_weights, sum(len(row[column]) for row in self.recorded.rows if row.get(column)))
        return check

    # Metrics

    def _metric_checks(self, collected: CollectedStep, metrics: Mapping[str, float], thorough: bool) -> list[Check]:
        """The step's metrics: those of its rollouts, and those of its update."""
        of_rollouts, of_update = Check("metrics of the rollouts", "metrics"), Check("metrics of the update", "metrics")
        logged = self.recorded.metrics
        if logged is None:
            of_rollouts.skip("metrics.jsonl does not have the step")
            return [of_rollouts]
        computed = dict(collected.batch.metrics) if collected.batch else {}
        if self.before is not None or self.recorded.step == 1:
            computed["num_tokens"] = (self.before or {}).get("num_tokens", 0) + computed.get("num_tokens", 0)
        else:
            computed.pop("num_tokens", None)
        computed["weight_version"] = self.recorded.step
        self._compare_metrics(of_rollouts, logged, computed, 1e-9, 1e-12)
        if self.weights and not self.weights.adds_alike:
            dealt = [name for name in DEALT if name in metrics]
            of_update.skip("they depend on the number of processes", len(dealt))
            metrics = {name: value for name, value in metrics.items() if name not in dealt}
        self._compare_metrics(of_update, logged, metrics, *self._metric_tolerance())
        for name in logged:
            known = name in computed or name in metrics or name in DEALT
            if not known and not name.startswith((*NOT_REPEATED, "step")):
                if not thorough and name.endswith(("/errors", "/timeouts")):
                    continue
                why = self.no_weights if not self.weights else "not computed again"
                of_update.skip(f"{why}: {name}" if self.weights else why)
        return [of_rollouts, of_update]

    def _metric_tolerance(self) -> tuple[float, float]:
        """Relative and absolute difference of the update's metrics that is rounding."""
        if self.weights and not self.exact:
            return limits.METRIC_TOLERANCE[self.weights.dtype]
        return limits.ORDER_TOLERANCE if self.weights and not self.weights.adds_alike else (0.0, 0.0)

    def _compare_metrics(
        self, check: Check, logged: Mapping[str, Any], computed: Mapping[str, float], relative: float, absolute: float
    ) -> None:
        again = json.loads(json_line(self.recorded.step, computed))  # as it is written
        for name, new in again.items():
            if name == "step" or name.startswith(NOT_REPEATED):
                continue
            if name not in logged:
                check.skip(f"not in metrics.jsonl: {name}")
                continue
            old = logged[name]
            difference = Difference(self.recorded.step, name, old, new)
            check.compare(difference, close(old, new, relative, absolute), old == new)

    def _record_metrics(self, rows: Sequence[Row]) -> Check:
        """The gap between sampler and trainer, from the recorded log-probs alone, against metrics.jsonl."""
        check, logged = Check("metrics of the recorded log-probs", "metrics"), self.recorded.metrics
        by_row = [row for group in self.recorded.trained for row in group.rows]
        algorithm = self.sources.source.run.algorithm
        terms = [
            _gaps(row, old, not algorithm.has_correction and old["version"] < self.recorded.step)
            for row, old in zip(rows, by_row, strict=True)
        ]
        spans = group_spans(len(self.recorded.trained), self.sources.source.run.train.minibatches)
        if algorithm.takes_sampler_as_old:  # the gap is measured in the first update only, and for stale rows as well
            terms, spans = [_gaps(row, old, False) for row, old in zip(rows, by_row, strict=True)], spans[:1]
        windows = [[t for row, t in zip(rows, terms, strict=True) if row.group in span and t] for span in spans]
        found = [_means(window) for window in windows if window]
        if not found or logged is None:
            return check
        mean, size = ({name: float(np.mean([one[name][i] for one in found])) for name in found[0]} for i in (0, 1))
        for name, new in mean.items():
            if (old := logged.get(name)) is not None:
                rounding = limits.SUM_ROUNDING * size[name] + limits.NOISE * size["gap"]
                check.compare(Difference(self.recorded.step, name, old, new), abs(old - new) <= rounding, old == new)
        return check


def _gaps(row: Row, recorded: Mapping[str, Any], is_stale: bool) -> dict[str, Tensor]:
    """The metrics of the gap at each token of a row in the loss; empty if the file has no log-probs of the update.

    is_stale: older weights sampled the row, so that the old policy is the sampler.
    """
    if recorded.get("trainer_logprobs") is None or not any(row.mask):
        return {}
    inside, sampler = torch.tensor(row.mask).bool(), torch.tensor(recorded["logprobs"])
    trainer = sampler if is_stale else torch.tensor(recorded["trainer_logprobs"])
    return gap_metrics(trainer[inside], sampler[inside]) | {"gap": (trainer - sampler)[inside]}


def _means(window: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """(mean, mean size) of each metric over the tokens of a window."""
    joined = {name: torch.cat([one[name] for one in window]).double() for name in window[0]}
    return {name: (float(values.mean()), float(values.abs().mean())) for name, values in joined.items()}


def checkpoint_check(step: int, differences: Mapping[str, float], dtype: str, exact: bool) -> Check:
    """The weights after a step against its checkpoint."""
    check, limit = Check("weights after the step", "tensors"), 0.0 if exact else limits.WEIGHT_TOLERANCE[dtype]
    for name, largest in differences.items():
        difference = Difference(step, f"largest difference of {name}", 0.0, largest)
        check.compare(difference, largest <= limit, largest == 0)
    return check


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return torch.isclose(one, other, rtol=limits.SUM_TOLERANCE, atol=1e-6, equal_nan=True)


def _none(value: float) -> float | None:
    return None if math.isnan(value) else value
