"""A table of the largest differences, which are asserted when they are measured and printed at the end."""

from __future__ import annotations

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

    equal: dict[str, dict[tuple[str, torch.dtype], tuple[float, float]]] = field(default_factory=dict)
    different: list[tuple[str, float, float, str]] = field(default_factory=list)

    def compare(self, what: str, quantity: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
        """Record the difference of two tensors computed in `dtype`, and fail if it is above the tolerance of `dtype`.

        The tolerance bounds both differences; of a scalar only the absolute one, since a loss is a sum of terms of
        either sign that may nearly cancel.
        """
        absolute, relative = difference(ours, theirs)
        cells = self.equal.setdefault(what, {})
        seen = cells.get((quantity, dtype), (0.0, 0.0))
        cells[quantity, dtype] = (max(seen[0], absolute), max(seen[1], relative))
        assert max(absolute, relative if ours.ndim else 0.0) <= TOLERANCE[dtype], (
            f"{what}, {quantity}: ours {ours.tolist()}, TRL's {theirs.tolist()}: "
            f"absolute {absolute:.3g}, relative {relative:.3g}, limit {TOLERANCE[dtype]:.0e}"
        )

    def explain(self, what: str, ours: Tensor, theirs: Tensor, ours_their_way: Tensor, reason: str) -> None:
        """Record a difference by definition: it must exist, and vanish when ours is computed as in TRL."""
        raw, left = difference(ours, theirs)[0], difference(ours_their_way, theirs)[0]
        self.different.append((what, raw, left, reason))
        assert raw > 1e-4, f"{what}: no difference ({raw:.3g}); the reason no longer holds: {reason}"
        assert left <= 1e-5, f"{what}: {left:.3g} of {raw:.3g} is not explained by: {reason}"

    def lines(self) -> list[str]:
        return [*self._equal_lines(), *self._different_lines()]

    def _equal_lines(self) -> list[str]:
        if not self.equal:
            return []
        head = f"{'grpocli against TRL':38}" + "".join(f"{column:>19}" for column in COLUMNS)
        lines = ["", head, f"{'largest difference':38}" + f"{'abs':>10}{'rel':>9}" * len(COLUMNS), "-" * len(head)]
        for what, cells in self.equal.items():
            lines.append(f"{what:38}" + "".join(_cell(cells.get(column)) for column in COLUMNS.values()))
        return [*lines, "abs: largest |ours - TRL's|; rel: that over the largest |TRL's|"]

    def _different_lines(self) -> list[str]:
        if not self.different:
            return []
        head = f"{'different by definition':38}{'abs':>10}{'left':>9}  why"
        rows = [f"{what:38}{raw:10.1e}{left:9.1e}  {reason}" for what, raw, left, reason in self.different]
        return ["", head, "-" * len(head), *rows, "left: the difference once ours is computed as TRL does"]


def difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest |ours - theirs|, and its ratio to the largest |theirs|."""
    assert ours.shape == theirs.shape, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    assert ours.isfinite().all(), "ours is not finite"
    absolute = float((ours.detach().double() - theirs.detach().double()).abs().max())
    return absolute, absolute / max(float(theirs.detach().abs().max()), 1e-30) if absolute else 0.0


def _cell(values: tuple[float, float] | None) -> str:
    return f"{'-':>10}{'-':>9}" if values is None else f"{values[0]:10.1e}{values[1]:9.1e}"
