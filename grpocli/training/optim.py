"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from grpocli.config.parts import one_of, part, require

if TYPE_CHECKING:
    import torch

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


@part("optim", "adamw")
class AdamW:
    """AdamW (arXiv 1711.05101) on float32 weights."""

    lr: float = 1e-6
    """Learning rate of an update, after the warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay: the share of a weight that an update takes away, times the learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates, per update, of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    warmup_steps: int = 0
    """Number of updates over which the learning rate rises linearly from 0."""
    schedule: str = "constant"
    """After the warm-up: `constant`, or `linear` or `cosine` towards 0, which is reached one update after the last."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this Euclidean norm over all weights; 0: never."""

    def __post_init__(self) -> None:
        require(self, "lr", 0 <= self.lr < math.inf, "must be a finite number of 0 or more")
        require(self, "weight_decay", 0 <= self.weight_decay < math.inf, "must be a finite number of 0 or more")
        require(
            self,
            "betas",
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "must be two numbers of at least 0 and below 1",
        )
        require(self, "eps", self.eps > 0, "must be above 0")
        require(self, "warmup_steps", self.warmup_steps >= 0, "must be 0 or more")
        one_of(self, "schedule", SCHEDULES)
        require(self, "max_grad_norm", self.max_grad_norm >= 0, "must be 0 (no clipping) or more")

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over the parameters with gradients. Norms and biases have no weight decay."""
        import torch

        trained = [p for p in parameters if p.requires_grad]
        dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in trained}  # ZeRO-3 flattens weights
        groups = [
            {"params": [p for p in trained if dims[p] >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if dims[p] < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=True,
        )

    def rate(self, update: int, total: int) -> float:
        """The learning rate of update number `update` (from 0) of `total`: a pure function, without state to save."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / (self.warmup_steps + 1)
        rest = max(total - self.warmup_steps, 1)
        return self.lr * SCHEDULES[self.schedule]((update - self.warmup_steps) / rest)
