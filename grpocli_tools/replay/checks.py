"""Comparing what a replay computes with what a run recorded: checks with counts, and located differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EXACT_SHARE = 0.99
"""A step is repeated to the bit if this share of its log-probs, or all but one, is equal to the bit: then all of them
have to be."""
LOGP_TOLERANCE = {"float32": 2e-3, "float16": 0.03, "bfloat16": 0.25}
"""Nats by which log-probs, entropies and ratios of the trainer may differ by rounding, by compute dtype, on another
device, number of processes or version of torch."""
SAMPLER_TOLERANCE = {"float32": 1e-2, "float16": 0.15, "bfloat16": 1.0}
"""Nats by which a sampler's log-prob of a token may differ from the trainer's, by compute dtype."""
SAMPLER_OUTLIER = 100.0
"""In float32, multiple of a step's median difference between sampler and trainer above which a token stands out."""
SAMPLER_ROUNDING = 2e-5
"""Nats below which a difference between sampler and trainer never stands out."""
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
        """An empty check."""
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
