"""The frozen policy that a KL term pulls towards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpocli.models.lora import switched_off
from grpocli.training.batch import MicroBatch
from grpocli.training.policy import Policy, completion_logp

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpocli.types import Sampling


class Reference:
    """A model of its own: the policy as it was at the start of the run, moved towards it by `mix` if the KL part asks.

    It has all weights even where the policy is a base model with LoRA: a mixture of low-rank updates has a higher
    rank than they have.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model: Any = policy.parallel.freeze(model.eval(), policy.dtype)
        self.policy = policy

    @torch.no_grad()
    def logp(self, batch: MicroBatch, sampling: Sampling) -> Tensor:
        """Log-probs [B, T] of the completions, in nats."""
        context = self.policy.parallel.computing(self.model, self.policy.dtype)
        return completion_logp(self.model, batch, sampling, context, at_head=self.policy.at_head)[0]

    @torch.no_grad()
    def mix(self, alpha: float) -> None:
        """reference = alpha x policy + (1 - alpha) x reference, weight by weight; of LoRA, the weights W + update.

        TR-DPO (arXiv 2404.09656), equation 5.
        """
        mine = dict(self.model.named_parameters())
        for name, theirs in self.policy.weights():
            mine.pop(name).lerp_(theirs, alpha)
        if mine:
            raise ValueError(f"the policy has no weights called {', '.join(sorted(mine))}")


class BaseReference(Reference):
    """The base model that a policy with LoRA trains updates to, with these switched off: no second copy in memory.

    The updates start at 0, so it is the policy as it was at the start of the run, to the bit. It never moves.
    """

    def __init__(self, policy: Policy) -> None:
        self.model, self.policy = policy.model, policy

    def logp(self, batch: MicroBatch, sampling: Sampling) -> Tensor:
        """Log-probs [B, T] of the completions, in nats."""
        with switched_off(self.model):
            return super().logp(batch, sampling)

    def mix(self, alpha: float) -> None:
        raise TypeError("the base model under LoRA does not move; a moving reference is a `Reference`")
