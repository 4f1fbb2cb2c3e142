"""Optimizers beside those of torch: several as one, and bitsandbytes' with moments of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps optimizers with different parameters, such as Muon for matrices and AdamW for the rest.

    It shares their groups, and one state with all of them."""

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
        """Load groups and state, as accelerate does; torch makes new ones, which are shared again."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the current gradients."""
        for part in self.parts:
            part.step()


MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Names in bitsandbytes' state and in the library of the values that 8 bits stand for: constants, for both moments."""


def adamw_8bit(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, whose state holds constants during an update only: checkpoints would repeat them."""
    import bitsandbytes

    class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
        def update_step(self, group: dict[str, Any], p: torch.nn.Parameter, gindex: int, pindex: int) -> None:
            state = self.state[p]
            for name, kind in MAPS.items():
                self.name2qmap[kind] = state[name] = self.name2qmap[kind].to(p.device)
            super().update_step(group, p, gindex, pindex)
            for name in MAPS:
                del state[name]

    made: torch.optim.Optimizer = AdamW8bit(groups, **options)
    return made
