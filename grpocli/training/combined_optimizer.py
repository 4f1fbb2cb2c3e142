"""Several optimizers of torch as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps optimizers with different parameters. It shares their groups, and one state with all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the current gradients."""
        for part in self.parts:
            part.step()
