"""A table of the largest differences, which are asserted when they are measured and printed at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


# The table's columns: the quantity, and the dtype it was computed in.
COLUMNS = {
    "value, float32": ("value", torch.float32),
    "value, float64": ("value", torch.float64),
    "gradient, float32": ("gradient", torch.float32),
    "gradient, float64": ("gradient", torch.float64),
    "metrics": ("metrics", torch.float32),
}


@dataclass(slots=True)
class Table:
    """`equal`: what -> {(quantity, dtype): (absolute, relative)}. `different`: (what, raw, left, reason)."""

    peer: str = "TRL"
    equal: dict[str, dict[tuple[str, torch.dtype], tuple[float, float]]] = field(default_factory=dict)
    different: list[tuple[str, float, float, str]] = field(default_factory=list)

    def compare(
        self, what: str, quantity: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype, limit: float | None = None
    ) -> None:
        """Record the difference of two tensors computed in `dtype`, and fail if it is above the limit (of `dtype`).

        The tolerance bounds both differences; of a scalar only the absolute one, since a loss is a sum of terms of
        either sign that may nearly cancel.
        """
        absolute, relative = difference(ours, theirs)
        limit = TOLERANCE[dtype] if limit is None else limit
        cells = self.equal.setdefault(what, {})
        seen = cells.get((quantity, dtype), (0.0, 0.0))
        cells[quantity, dtype] = (max(seen[0], absolute), max(seen[1], relative))
        assert max(absolute, relative if ours.ndim else 0.0) <= limit, (
            f"{what}, {quantity}: ours {ours.tolist()}, theirs {theirs.tolist()}: "
            f"absolute {absolute:.3g}, relative {relative:.3g}, limit {limit:.0e}"
        )

    def explain(
        self,
        what: str,
        ours: Tensor,
        theirs: Tensor,
        ours_their_way: Tensor,
        reason: str,
        *,
        least: float = 1e-4,
        most: float = 1e-5,
    ) -> None:
        """Record a difference by definition: above `least`, and at most `most` when ours is computed their way."""
        raw, left = difference(ours, theirs)[0], difference(ours_their_way, theirs)[0]
        self.different.append((what, raw, left, reason))
        assert raw > least, f"{what}: no difference ({raw:.3g}); the reason no longer holds: {reason}"
        assert left <= most, f"{what}: {left:.3g} of {raw:.3g} is not explained by: {reason}"

    def lines(self) -> list[str]:
        return [*self._equal_lines(), *self._different_lines()]

    def _equal_lines(self) -> list[str]:
        if not self.equal:
            return []
        columns = {name: key for name, key in COLUMNS.items() if any(key in cells for cells in self.equal.values())}
        width = self._width(self.equal)
        head = f"{f'grpocli against {self.peer}':{width}}" + "".join(f"{column:>19}" for column in columns)
        lines = ["", head, f"{'largest difference':{width}}" + f"{'abs':>10}{'rel':>9}" * len(columns), "-" * len(head)]
        for what, cells in self.equal.items():
            lines.append(f"{what:{width}}" + "".join(_cell(cells.get(column)) for column in columns.values()))
        return [*lines, "abs: largest |ours - theirs|; rel: that over the largest |theirs|"]

    def _different_lines(self) -> list[str]:
        if not self.different:
            return []
        width = self._width(what for what, *_ in self.different)
        head = f"{'different by definition':{width}}{'abs':>10}{'left':>9}  why"
        rows = [f"{what:{width}}{raw:10.1e}{left:9.1e}  {reason}" for what, raw, left, reason in self.different]
        return ["", head, "-" * len(head), *rows, f"left: the difference once ours is computed as {self.peer} does"]

    @staticmethod
    def _width(names: Iterable[str]) -> int:
        return max(38, *(len(name) + 2 for name in names))


def difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest |ours - theirs|, and its ratio to the largest |theirs|."""
    assert ours.shape == theirs.shape, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    assert ours.isfinite().all(), "ours is not finite"
    absolute = float((ours.detach().double() - theirs.detach().double()).abs().max())
    return absolute, absolute / max(float(theirs.detach().abs().max()), 1e-30) if absolute else 0.0


def _cell(values: tuple[float, float] | None) -> str:
    return f"{'-':>10}{'-':>9}" if values is None else f"{values[0]:10.1e}{values[1]:9.1e}"
