"""One step computed again and compared with its record."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpocli.progress import Progress
from grpocli.rewards.reward import answer_columns
from grpocli.runs.metrics import json_line
from grpocli.runs.rollouts import rollout_table
from grpocli.training.collector import RolloutBatch, records_of
from grpocli.training.micro_batch import rows_of
from grpocli.types import Completion, Group, Row, Status
from grpocli_tools.replay import checks as limits
from grpocli_tools.replay.checks import Check, Columns, Difference, close, compare_rows
from grpocli_tools.replay.collection import CollectedStep, RolloutSource, collect_again
from grpocli_tools.replay.record import RecordedStep
from grpocli_tools.replay.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = (
    Columns("prompts", ("task", "uid", "prompt", "messages", "answer", "columns", "prompt_ids")),
    Columns("tokens", ("completion_ids",), per_token=True),
    Columns("texts", ("completion", "episode", "turns")),
    Columns("lengths and masks", ("length", "loss_mask")),
    Columns("finish reasons", ("finish_reason",)),
    Columns("status", ("step", "sampled_step", "group", "status")),
    Columns("weight versions", ("version", "version_spans")),
    Columns("sum of rewards", ("reward",), limits.SUM_TOLERANCE, 1e-9),
)
"""Checks of columns that need no weights."""
WEIGHT_COLUMNS = {
    "trainer log-probs": "trainer_logprobs",
    "entropies": "entropies",
    "ratios": "ratios",
    "clipped": "clipped",
}
"""Checks of columns that the update computes."""
UNKNOWN_END = "the tokens that end a completion of this engine are unknown"
VARIES = "the reward cannot be repeated: two calls with the same completions gave different scores"
DEALT = ("tokens/padding", "tokens/shared")
"""Metrics that depend on the rows that each process gets."""
NOT_REPEATED = ("curriculum/", "time/", "sync/", "eval/", "memory/", "engine/", "step")
"""Prefixes of metrics that do not follow from a step's rollouts and weights."""
OF_CALLS = ("/errors", "/timeouts")
"""Ends of metrics of the calls of rewards, which are not made in the same way."""


@dataclass
class StepReplay:
    """Computes a step again."""

    recorded: RecordedStep
    source: RolloutSource
    weights: Weights | None
    """Those before the step, which `checks` trains on."""
    no_weights: str
    """Why there are none."""
    before: Mapping[str, Any] | None
    """The metrics of the step before, for running totals."""
    progress: Progress
    exact: bool | None = None
    """Whether the log-probs are equal to the bit; None if nothing says so."""

    def checks(self, thorough: bool) -> list[Check]:
        """All checks. thorough: call the rewards, and score the completions that the update did not compute."""
        recorded, algorithm = self.recorded, self.source.run.algorithm
        collected = collect_again(self.source, recorded)
        trained = [collected.groups[group.number] for group in recorded.trained]
        computed_PG = collected.collector.advantages(trained)
        rows = rows_of(trained, self._trained_on(trained), algorithm, recorded.step)
        logp = self._logp_before_update(rows, collected.groups) if thorough else {}
        metrics = self.weights.train(rows, len(trained)) if self.weights else {}
        expected = self._expected_rows(collected, rows)
        found = [*self._column_checks(expected, collected.drawn), self._advantages(computed_PG, trained)]
        found += [self._selection(collected), *(self._reward_checks(collected.groups) if thorough else [])]
        found += self._update_checks(expected)
        if thorough:
            found.append(self._sampler_check(rows, collected.groups, logp))
        found += self._metric_checks(collected, metrics)
        return [check for check in found if check.agree or check.differ or check.why]

    @property
    def _size(self) -> int:
        """Completions of a group."""
        return self.source.run.rollout.group_size

    @cached_property
    def _trained_places(self) -> list[int]:
        """The places in the file of the update's rows."""
        return [group.number * self._size + k for group in self.recorded.trained for k in range(self._size)]

    # What the step trained on

    def _trained_on(self, trained: Sequence[Group]) -> Tensor:
        """The recorded advantages [P, G], without the prompts' loss multipliers, so that later steps stay right."""
        rows_PG = [[row["advantage"] or 0.0 for row in group.rows] for group in self.recorded.trained]
        factors_P1 = _multipliers_P1(trained)
        recorded_PG = torch.tensor(rows_PG, dtype=torch.float64).reshape(len(trained), -1)
        return recorded_PG / factors_P1.where(factors_P1 != 0, 1.0)

    def _expected_rows(self, collected: CollectedStep, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The rows that the step's rollout file should have, in the file's order."""
        source, groups, size = self.source, self.recorded.groups, self._size
        order = sorted(groups, key=lambda group: not group.in_update)
        statuses = {group.uid: status for status, group in collected.batch.untrained} if collected.batch else {}
        batch = RolloutBatch(
            [collected.groups[group.number] for group in order if group.in_update],
            {},
            untrained=[(statuses.get(g.uid, g.status), collected.groups[g.number]) for g in order if not g.in_update],
            leftover_uids=frozenset(group.uid for group in groups if group.is_leftover),
        )
        records = records_of(batch, rows, source.run.algorithm, source.weights, self.recorded.step)
        found = rollout_table(records, self.recorded.step, answer_columns(source.run.reward.values())).to_pylist()
        place = {group.number: i for i, group in enumerate(order)}
        return [row for group in groups for row in found[place[group.number] * size : (place[group.number] + 1) * size]]

    # Checks of the file's columns

    def _compare(self, spec: Columns, expected: Sequence[Mapping[str, Any]]) -> Check:
        def token_text(token: int) -> str:
            return str(self.source.tokenizer.decode([token]))

        return compare_rows(self.recorded.step, spec, self.recorded.rows, expected, self._size, token_text)

    def _column_checks(self, expected: Sequence[dict[str, Any]], drawn: bool) -> Iterator[Check]:
        changed = "most prompts differ from the task's data, which has changed"
        for spec in COLUMNS:
            if spec.name == "prompts" and not drawn:
                count = len(expected) * len(spec.columns)
                yield spec.check().skip(f"not drawn again: {self.source.no_prompts or changed}", count)
                spec = replace(spec, name="prompts in their group")
            if spec.name == "finish reasons" and not self.source.end_ids:
                yield spec.check().skip(UNKNOWN_END, len(expected))
            else:
                yield self._compare(spec, expected)

    def _reward_checks(self, groups: Sequence[Group]) -> Iterator[Check]:
        """The rewards computed again. Those that see the group get the recorded scores of the others."""
        for name in self.source.run.reward:
            column = f"reward/{name}"
            spec = Columns(f"reward {name}", (column,), limits.SUM_TOLERANCE, 1e-9)
            if why := self.source.skipped.get(name):
                yield spec.check().skip(f"not called again: {why}", len(self.recorded.rows))
                continue
            scores = self.source.scores(name, groups)
            check = self._compare(spec, [{column: _none(score)} for score in scores])
            if check.differ:  # it may draw random numbers, or keep a state
                again = self.source.scores(name, groups)
                if not np.allclose(scores, again, rtol=limits.SUM_TOLERANCE, atol=1e-9, equal_nan=True):
                    check.excuse(VARIES)
            yield check

    def _advantages(self, computed_PG: Tensor, trained: Sequence[Group]) -> Check:
        """Advantages of the recorded rewards against the file's."""
        numbers = [group.number for group in self.recorded.trained]
        by_group = dict(zip(numbers, (computed_PG * _multipliers_P1(trained)).float().tolist(), strict=True))
        rows = [{"advantage": v} for g in self.recorded.groups for v in by_group.get(g.number, [None] * self._size)]
        return self._compare(Columns("advantages", ("advantage",), limits.SUM_TOLERANCE, 1e-6), rows)

    def _selection(self, collected: CollectedStep) -> Check:
        """The groups that were kept and dropped, by the recorded rewards, in their order."""
        check, groups, step = Check("selection of groups", "groups"), self.recorded.groups, self.recorded.step
        if collected.batch is None:
            check.compare(Difference(step, "selection", "as in the file", collected.problem), same=False)
            return check
        outcomes = [(Status.TRAINED, group) for group in collected.batch.groups] + collected.batch.untrained
        expected = {group.uid: str(status) for status, group in outcomes}
        for group in groups:
            old, new = str(group.status), expected.get(group.uid, "not sampled")
            check.compare(Difference(step, "selection", old, new, group.number), same=old == new)
        if not check.differ and [group.uid for group in groups] != list(expected):
            check.compare(Difference(step, "selection", "order of the file", "another order"), same=False)
        return check

    # Checks of the update

    def _update_checks(self, expected: Sequence[dict[str, Any]]) -> Iterator[Check]:
        """Log-probs, entropies, ratios and clipped tokens of the update."""
        for name, column in WEIGHT_COLUMNS.items():
            spec = Columns(name, (column,), per_token=True)
            if self.weights is None:
                yield spec.check().skip(self.no_weights, sum(len(row.get(column) or ()) for row in self.recorded.rows))
                continue
            tolerance = limits.LOGP_TOLERANCE[self.weights.dtype]
            rounded = replace(spec, relative=tolerance if column == "ratios" else 0.0, absolute=tolerance)
            check = self._compare(rounded, expected)
            if self.exact is None and check.agree + check.differ:
                unequal = check.rounded + check.differ
                self.exact = unequal <= max(1, (1 - limits.EXACT_SHARE) * (check.agree + check.differ))
            if self.exact and check.rounded:
                check = self._compare(spec, expected)
            elif column == "clipped" and check.differ and not self.exact:
                check.excuse("rounding may move a token across the limit")
            yield check

    # The sampler's log-probs against those of the weights that sampled the completions

    def _not_comparable(self) -> str:
        """Why the sampler's log-probs cannot be compared; empty if they can."""
        run = self.source.run
        if self.weights is None:
            return self.no_weights
        if run.rollout.sampling.structure:
            return f"rollout.{run.rollout.sampling.structure} masks tokens in the sampler only"
        return "the engine rounds the weights" if run.engine.quantizes else ""

    def _logp_before_update(self, rows: Sequence[Row], groups: Sequence[Group]) -> dict[int, Tensor]:
        """Log-probs, by place in the file, under the weights that sampled the completion.

        Those that the update computes are left out.
        """
        if self.weights is None or self._not_comparable():
            return {}
        algorithm = self.source.run.algorithm
        found: dict[int, Tensor] = {}
        every = dict(zip(self._trained_places, rows, strict=True))
        # with the sampler as old policy, the update computes most rows only after the weights have changed
        at_start = not algorithm.takes_sampler_as_old
        computed = {i for i, row in every.items() if at_start and self.weights.updater.is_computed(row)}
        zeros_1G = torch.zeros(1, self._size, dtype=torch.float64)
        for group in self.recorded.groups:
            if not group.in_update:
                own = rows_of([groups[group.number]], zeros_1G, algorithm, self.recorded.step)
                every |= {group.number * self._size + k: row for k, row in enumerate(own)}
        versions = [_first_version(r.completion) for group in groups for r in group.rollouts]
        for version in filter(self.weights.has_version, sorted(set(versions))):
            skipped = computed if version == self.recorded.step else set()
            places = [i for i in every if versions[i] == version and i not in skipped]
            with self.weights.at_version(version):
                found |= dict(zip(places, self.weights.score([every[i] for i in places], self.progress), strict=True))
        return found

    def _sampler_check(self, rows: Sequence[Row], groups: Sequence[Group], scored: Mapping[int, Tensor]) -> Check:
        """rows: after the update. scored: from `_logp_before_update`."""
        check = Check("sampler log-probs", "tokens")
        if why := self._not_comparable():
            return check.skip(why, sum(row["length"] or 0 for row in self.recorded.rows))
        assert self.weights is not None
        now = {i: row.logp for i, row in zip(self._trained_places, rows, strict=True) if row.logp is not None}
        pairs: list[tuple[int, int, float, float]] = []
        for place, done in enumerate(r.completion for group in groups for r in group.rollouts):
            version, unchanged = _first_version(done), done.spans[0][1] if done.spans else len(done.token_ids)
            logp = scored.get(place, now.get(place) if version == self.recorded.step else None)
            for t, inside in enumerate(done.mask or [1] * len(done.token_ids)):
                if inside and t >= unchanged:
                    check.skip("weights changed while the completion was sampled")
                elif inside and (logp is None or math.isnan(logp[t])):
                    check.skip(f"the weights of version {version} are not available")
                elif inside and logp is not None:
                    pairs.append((place, t, self.recorded.rows[place]["logprobs"][t], float(logp[t])))
        limit = limits.SAMPLER_TOLERANCE[self.weights.dtype]
        if pairs and self.weights.dtype == "float32":
            usual = statistics.median(abs(old - new) for *_, old, new in pairs)
            limit = min(limit, max(limits.SAMPLER_ROUNDING, limits.SAMPLER_OUTLIER * usual))
        for place, t, old, new in pairs:
            token = self.recorded.rows[place]["completion_ids"][t]
            text = str(self.source.tokenizer.decode([token])) if abs(old - new) > limit else ""
            difference = Difference(self.recorded.step, "logprobs", old, new, *divmod(place, self._size), t, text)
            check.compare(difference, abs(old - new) <= limit, old == new)
        return check

    # Metrics

    def _metric_checks(self, collected: CollectedStep, metrics: Mapping[str, float]) -> list[Check]:
        """The step's metrics: those of its rollouts, and those of its update."""
        of_rollouts, of_update = Check("metrics of the rollouts", "metrics"), Check("metrics of the update", "metrics")
        logged, adds_alike = self.recorded.metrics, self.weights is None or self.weights.adds_alike
        if logged is None:
            return [of_rollouts.skip("metrics.jsonl does not have the step")]
        computed = {"weight_version": self.recorded.step, **(collected.batch.metrics if collected.batch else {})}
        earlier = {"num_tokens": 0} if self.recorded.step == 1 else self.before
        tokens = computed.pop("num_tokens", 0)
        if earlier is not None:
            computed["num_tokens"] = earlier.get("num_tokens", 0) + tokens
        self._compare_metrics(of_rollouts, logged, computed, 1e-9, 1e-12)
        tolerance = (0.0, 0.0) if adds_alike else limits.ORDER_TOLERANCE
        if self.weights and not self.exact:
            tolerance = limits.METRIC_TOLERANCE[self.weights.dtype]
        left_out = () if adds_alike else tuple(name for name in DEALT if name in metrics)
        of_update.skip("they depend on the number of processes", len(left_out))
        self._compare_metrics(of_update, logged, {k: v for k, v in metrics.items() if k not in left_out}, *tolerance)
        for name in logged.keys() - computed.keys() - metrics.keys() - set(DEALT):
            if not name.startswith(NOT_REPEATED) and not name.endswith(OF_CALLS):
                of_update.skip(f"not computed again: {name}" if self.weights else self.no_weights)
        return [of_rollouts, of_update]

    def _compare_metrics(
        self, check: Check, logged: Mapping[str, Any], computed: Mapping[str, float], relative: float, absolute: float
    ) -> None:
        again = json.loads(json_line(self.recorded.step, computed))  # as it is written
        for name, new in again.items():
            if name.startswith(NOT_REPEATED) or name.endswith(OF_CALLS):
                continue
            if name not in logged:
                check.skip(f"not in metrics.jsonl: {name}")
                continue
            old = logged[name]
            difference = Difference(self.recorded.step, name, old, new)
            check.compare(difference, close(old, new, relative, absolute), old == new)


def checkpoint_check(step: int, differences: Mapping[str, float], dtype: str, exact: bool) -> Check:
    """The weights after a step against its checkpoint."""
    check, limit = Check("weights after the step", "tensors"), 0.0 if exact else limits.WEIGHT_TOLERANCE[dtype]
    for name, largest in differences.items():
        difference = Difference(step, f"largest difference of {name}", 0.0, largest)
        check.compare(difference, largest <= limit, largest == 0)
    return check


def _multipliers_P1(groups: Sequence[Group]) -> Tensor:
    """The prompts' loss multipliers."""
    return torch.tensor([[group.prompt.loss_multiplier] for group in groups], dtype=torch.float64).reshape(-1, 1)


def _first_version(completion: Completion) -> int:
    """The weight version of a completion's first token."""
    return completion.spans[0][0] if completion.spans else completion.version


def _none(value: float) -> float | None:
    return None if math.isnan(value) else value
