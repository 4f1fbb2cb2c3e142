"""The model that is trained: how it scores tokens, and what an engine may know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from grpocli.distributed.parallel import Alone, Parallel
from grpocli.models.lora import is_adapted, merged, switched_off
from grpocli.training.logprobs import completion_logp
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.packing import Layout, Packed, Padded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from grpocli.types import Sampling


class Policy:
    """A causal language model with float32 weights that computes in `dtype`.

    `wrapped` is what training calls; `model` is underneath, the same object or not. `parallel`: how processes share it;
    one that has it to itself needs none. packs: whether it takes rows end to end; at_head: whether its logits
    are what its output head returns (`grpocli.training.packing_check` finds out).
    """

    def __init__(
        self, model: PreTrainedModel, wrapped: torch.nn.Module, dtype: torch.dtype, parallel: Parallel | None = None
    ) -> None:
        self.model, self.wrapped, self.dtype = model, wrapped, dtype
        self.parallel: Parallel = parallel or Alone(model.device)
        self.packs, self.at_head = False, True

    def layout(self, sampling: Sampling) -> type[Layout]:
        """How micro-batches lie in a forward."""
        return Packed if self.packs and sampling.repetition_penalty == 1 else Padded

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, tied ones once; with LoRA, the base model's, updates added.

        Where processes share them, their parts: `parallel.gather` makes them whole.
        """
        named = self.parallel.parameters(self.model)
        if is_adapted(self.model):
            return merged(self.model, named)
        return ((name, parameter.detach()) for name, parameter in named)

    def computing(self) -> AbstractContextManager[Any]:
        """Around a forward, so that it computes in `dtype`."""
        return self.parallel.computing(self.model, self.dtype)

    @contextmanager
    def sampling_mode(self) -> Iterator[None]:
        """Evaluation mode, no gradients; any number of forwards in this process. To enter is collective."""
        with self._evaluating(), self.parallel.sampling(self.model, self.dtype):
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1. Collective where weights are
        shared."""
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with self._evaluating(), self.computing():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float()
        logp: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return logp

    def logp(self, batch: MicroBatch, sampling: Sampling, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [B, T] of the completions under the sampling distribution (with gradient), and entropies [B, T].

        Nats; entropies carry a gradient only if asked. Calls `wrapped`: in training every process must call it
        equally often.
        """
        return completion_logp(self.wrapped, batch, sampling, self.computing(), entropy_gradient, self.at_head)

    @torch.no_grad()
    def logp_without_gradient(self, batch: MicroBatch, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """As `logp`, of this process alone."""
        return completion_logp(self.model, batch, sampling, self.computing(), at_head=self.at_head)


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
