"""The frozen policy that a KL term pulls towards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from grpocli.training.batch import MicroBatch
from grpocli.training.policy import Policy, completion_logp

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpocli.data import Sampling


class Reference:
    """The policy as it was at the start of the run, moved towards it by `mix` if the KL part asks."""

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model = model.eval().requires_grad_(False)
        self.policy = policy

    @torch.no_grad()
    def logp(self, batch: MicroBatch, sampling: Sampling) -> Tensor:
        """Log-probs [B, T] of the completions, in nats."""
        context: AbstractContextManager[Any] = self.policy.computing()
        return completion_logp(self.model, batch, sampling, context)[0]

    @torch.no_grad()
    def mix(self, alpha: float) -> None:
        """reference = alpha x policy + (1 - alpha) x reference: TR-DPO (arXiv 2404.09656), equation 5."""
        for mine, theirs in zip(self.model.parameters(), self.policy.model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), alpha)
