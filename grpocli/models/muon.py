"""Muon (Jordan et al. 2024), which learns the warm start in a third of AdamW's steps.

In float32: torch.optim.Muon computes in bfloat16, which is many times slower on a CPU without such instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial that drives singular values towards 1
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised momentum of matrices; those of one shape are handled together."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the present gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for matrices in by_shape.values():
                self._step(matrices, group["lr"], group["momentum"])

    def _step(self, matrices: list[Tensor], lr: float, momentum: float) -> None:
        gradients = torch.stack([m.grad for m in matrices if m.grad is not None])
        state = self.state[matrices[0]]
        average = state.setdefault("momentum", torch.zeros_like(gradients))
        average.lerp_(gradients, 1 - momentum)
        directions = orthogonalise(gradients.lerp(average, momentum))
        rows, columns = matrices[0].shape
        for matrix, direction in zip(matrices, directions, strict=True):
            matrix.add_(direction, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalise(matrices_NRC: Tensor) -> Tensor:
    """The nearest matrices whose singular values are about 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if tall else matrices_NRC
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result
