"""bitsandbytes' AdamW with moments of 8 bits, whose state has nothing that parameters share."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch

MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Names in the state and in bitsandbytes of the values that 8 bits stand for: constants, for both moments."""


class AdamW8bitOptimizer(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
    """The state of a parameter holds constants during its update only: a checkpoint would repeat them for each."""

    def update_step(self, group: dict[str, Any], p: torch.nn.Parameter, gindex: int, pindex: int) -> None:
        """Update one parameter."""
        state = self.state[p]
        for name, kind in MAPS.items():
            self.name2qmap[kind] = state[name] = self.name2qmap[kind].to(p.device)
        super().update_step(group, p, gindex, pindex)
        for name in MAPS:
            del state[name]
