"""One step computed again and compared with its record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpocli.rewards.reward import answer_columns
from grpocli.runs.metrics import json_line
from grpocli.runs.rollouts import rollout_table
from grpocli.training.collector import RolloutBatch, records_of
from grpocli.training.packing import rows_of
from grpocli.types import Group, Row, Status
from grpocli_tools.replay.collection import CollectedStep, RecordedStep, RolloutSource, collect_again
from grpocli_tools.replay.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

EXACT_SHARE = 0.99
"""A step is repeated to the bit if this share of its log-probs, or all but one, is equal to the bit: then all of them
have to be."""
LOGP_TOLERANCE = {"float32": 2e-3, "float16": 0.03, "bfloat16": 0.25}
"""Nats by which log-probs, entropies and ratios of the trainer may differ by rounding, by compute dtype, on another
device, number of processes or version of torch."""
METRIC_TOLERANCE = {"float32": (1e-2, 1e-3), "float16": (0.05, 0.01), "bfloat16": (0.2, 0.05)}
"""Relative and absolute difference of metrics that may be rounding, by compute dtype."""
WEIGHT_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Difference of weights that may be rounding, by compute dtype."""
SUM_TOLERANCE = 1e-6
"""Relative difference of sums, advantages and rewards that may be rounding."""
ORDER_TOLERANCE = (1e-4, 1e-6)
"""Relative and absolute difference of metrics of equal log-probs that another number of processes has added."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs. Its place is None where it does not apply."""

    step: int
    what: str
    recorded: Any
    recomputed: Any
    group: int | None = None
    completion: int | None = None
    token: int | None = None
    token_text: str = ""


@dataclass(slots=True)
class Check:
    """The result of one comparison: how many values agree, differ and cannot be checked."""

    name: str
    unit: str = "completions"
    """Of the counts."""
    agree: int = 0
    rounded: int = 0
    """Of those that agree, the ones that are not equal to the bit."""
    differences: list[Difference] = field(default_factory=list)
    why: dict[str, int] = field(default_factory=dict)
    """The reasons why values cannot be checked, and how many."""

    @property
    def differ(self) -> int:
        return len(self.differences)

    @property
    def unchecked(self) -> int:
        return sum(self.why.values())

    def skip(self, why: str, count: int = 1) -> Check:
        """Count values that cannot be checked. Returns the check."""
        if count:
            self.why[why] = self.why.get(why, 0) + count
        return self

    def excuse(self, why: str) -> None:
        """Count the differences as values that cannot be checked."""
        self.skip(why, self.differ)
        self.differences = []

    def compare(self, difference: Difference, same: bool, exact: bool = True) -> None:
        """Count a value; the difference is kept unless it is the same."""
        if same:
            self.agree += 1
            self.rounded += not exact
        else:
            self.differences.append(difference)


def total(checks: Iterable[Check]) -> list[Check]:
    """One check for each name, with the counts of all steps."""
    found: dict[str, Check] = {}
    for one in checks:
        whole = found.setdefault(one.name, Check(one.name, one.unit))
        whole.agree, whole.rounded = whole.agree + one.agree, whole.rounded + one.rounded
        whole.differences = whole.differences + one.differences
        for why, count in one.why.items():
            whole.skip(why, count)
    return list(found.values())


def close(recorded: Any, recomputed: Any, relative: float, absolute: float = 0.0) -> bool:
    """Whether two numbers are equal within a tolerance; other values must be equal."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (recorded, recomputed))
    if not numbers or recorded == recomputed:
        return bool(recorded == recomputed)
    return math.isclose(recorded, recomputed, rel_tol=relative, abs_tol=absolute)


@dataclass(frozen=True, slots=True)
class Columns:
    """A check of some columns of a rollout file."""

    name: str
    columns: tuple[str, ...]
    relative: float = 0.0
    """Tolerance of numbers."""
    absolute: float = 0.0
    """Tolerance of numbers."""
    per_token: bool = False
    """Whether lists are compared token by token."""

    def check(self) -> Check:
        of_each = "completions" if len(self.columns) == 1 else f"values, {len(self.columns)} a completion"
        return Check(self.name, "tokens" if self.per_token else of_each)


def compare_rows(
    step: int,
    spec: Columns,
    recorded: Sequence[Mapping[str, Any]],
    recomputed: Sequence[Mapping[str, Any]],
    group_size: int,
    token_text: Callable[[int], str],
) -> Check:
    """Compare columns of a step's rows, cell by cell, and token by token in lists of one value per token."""
    check = spec.check()
    for number, (old, new) in enumerate(zip(recorded, recomputed, strict=True)):
        place = number // group_size, number % group_size
        for column in spec.columns:
            if column not in old:
                check.skip(f"the file has no column {column}")
                continue
            before, after, ids = old[column], new[column], old.get("completion_ids") or []
            if not (spec.per_token and isinstance(before, list) and isinstance(after, list)):
                if not (spec.per_token and before is None and after is None):
                    same = close(before, after, spec.relative, spec.absolute)
                    check.compare(Difference(step, column, before, after, *place), same, before == after)
                continue
            for t in range(max(len(before), len(after))):
                one, other = (values[t] if t < len(values) else None for values in (before, after))
                same = close(one, other, spec.relative, spec.absolute)
                text = token_text(ids[t]) if not same and t < len(ids) else ""
                check.compare(Difference(step, column, one, other, *place, t, text), same, one == other)
    return check


COLUMNS = (
    Columns("prompts", ("task", "uid", "prompt", "messages", "answer", "columns", "prompt_ids")),
    Columns("tokens", ("completion_ids",), per_token=True),
    Columns("texts", ("completion", "episode", "turns")),
    Columns("lengths and masks", ("length", "loss_mask")),
    Columns("finish reasons", ("finish_reason",)),
    Columns("status", ("step", "sampled_step", "group", "status")),
    Columns("weight versions", ("version", "version_spans")),
    Columns("sum of rewards", ("reward",), SUM_TOLERANCE, 1e-9),
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
NOT_REPEATED = ("time/", "sync/", "eval/", "memory/", "engine/", "stream/", "step")
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
    exact: bool | None = None
    """Whether the log-probs are equal to the bit; None if nothing says so."""

    def checks(self, thorough: bool) -> list[Check]:
        """All checks. thorough: call the rewards, too."""
        recorded, algorithm = self.recorded, self.source.run.algorithm
        collected = collect_again(self.source, recorded)
        trained = [collected.groups[group.number] for group in recorded.trained]
        computed_PG = collected.collector.advantages(trained)
        rows = rows_of(trained, self._trained_on(trained), algorithm, recorded.step)
        metrics = self.weights.train(rows, len(trained)) if self.weights else {}
        expected = self._expected_rows(collected, rows)
        found = [*self._column_checks(expected, collected.drawn), self._advantages(computed_PG, trained)]
        found += [self._selection(collected), *(self._reward_checks(collected.groups) if thorough else [])]
        found += self._update_checks(expected)
        found += self._metric_checks(collected, metrics)
        return [check for check in found if check.agree or check.differ or check.why]

    @property
    def _size(self) -> int:
        return self.source.run.rollout.group_size

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
            spec = Columns(f"reward {name}", (column,), SUM_TOLERANCE, 1e-9)
            if why := self.source.skipped.get(name):
                yield spec.check().skip(f"not called again: {why}", len(self.recorded.rows))
                continue
            scores = self.source.scores(name, groups)
            check = self._compare(spec, [{column: _none(score)} for score in scores])
            if check.differ:  # it may draw random numbers, or keep a state
                again = self.source.scores(name, groups)
                if not np.allclose(scores, again, rtol=SUM_TOLERANCE, atol=1e-9, equal_nan=True):
                    check.excuse(VARIES)
            yield check

    def _advantages(self, computed_PG: Tensor, trained: Sequence[Group]) -> Check:
        """Advantages of the recorded rewards against the file's."""
        numbers = [group.number for group in self.recorded.trained]
        by_group = dict(zip(numbers, (computed_PG * _multipliers_P1(trained)).float().tolist(), strict=True))
        rows = [{"advantage": v} for g in self.recorded.groups for v in by_group.get(g.number, [None] * self._size)]
        return self._compare(Columns("advantages", ("advantage",), SUM_TOLERANCE, 1e-6), rows)

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
            tolerance = LOGP_TOLERANCE[self.weights.dtype]
            rounded = replace(spec, relative=tolerance if column == "ratios" else 0.0, absolute=tolerance)
            check = self._compare(rounded, expected)
            if self.exact is None and check.agree + check.differ:
                unequal = check.rounded + check.differ
                self.exact = unequal <= max(1, (1 - EXACT_SHARE) * (check.agree + check.differ))
            if self.exact and check.rounded:
                check = self._compare(spec, expected)
            elif column == "clipped" and check.differ and not self.exact:
                check.excuse("rounding may move a token across the limit")
            yield check

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
        tolerance = (0.0, 0.0) if adds_alike else ORDER_TOLERANCE
        if self.weights and not self.exact:
            tolerance = METRIC_TOLERANCE[self.weights.dtype]
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
    check, limit = Check("weights after the step", "tensors"), 0.0 if exact else WEIGHT_TOLERANCE[dtype]
    for name, largest in differences.items():
        difference = Difference(step, f"largest difference of {name}", 0.0, largest)
        check.compare(difference, largest <= limit, largest == 0)
    return check


def _multipliers_P1(groups: Sequence[Group]) -> Tensor:
    return torch.tensor([[group.prompt.loss_multiplier] for group in groups], dtype=torch.float64).reshape(-1, 1)


def _none(value: float) -> float | None:
    return None if math.isnan(value) else value
