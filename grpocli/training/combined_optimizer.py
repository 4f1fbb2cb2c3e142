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
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, also as accelerate does; torch makes new ones, which are shared again."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the current gradients."""
        for part in self.parts:
            part.step()
