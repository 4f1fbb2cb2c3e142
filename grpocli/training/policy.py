"""The policy, which is trained, and the reference, which a KL term pulls it towards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpocli.distributed.parallel import Parallel
from grpocli.models.lora import is_adapted, merged, switched_off
from grpocli.training.logprobs import TokenScores, completion_scores
from grpocli.training.packing import Layout, MicroBatch, Packed, Padded, RowBatch, shards_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpocli.distributed.context_parallel import ContextParallel
    from grpocli.types import Sampling


class Policy:
    """A causal language model with float32 weights that computes in `dtype`."""

    def __init__(
        self, model: PreTrainedModel, wrapped: torch.nn.Module, dtype: torch.dtype, parallel: Parallel | None = None
    ) -> None:
        """wrapped: what training calls, the model or a wrapper (DDP, DeepSpeed). parallel: None in a process alone."""
        self.model, self.wrapped, self.dtype = model, wrapped, dtype
        self.parallel: Parallel = parallel or Parallel(model.device)
        self.packs = False
        """Whether it takes packed rows, as `grpocli.training.trials` finds out."""
        self.packed: type[Packed] = Packed
        """Their layout."""
        self.at_head = True
        """Whether its logits are exactly the output of its output head, as trials find out."""
        self.compiles = False
        """Whether decoder layers are compiled."""
        self.recomputes = False
        """Whether the backward pass computes activations again."""
        self.shared_with: ContextParallel | None = None
        """The processes that share each micro-batch; None: this one alone."""

    def layout(self, sampling: Sampling) -> type[Layout]:
        """Whether the rows of a micro-batch are packed or padded."""
        if not self.packs or sampling.repetition_penalty != 1:
            return Padded
        return shards_of(self.shared_with, self.packed) if self.shared_with else self.packed

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its Hugging Face name, tied ones once, with LoRA's updates added; shards under FSDP2."""
        named = self.parallel.parameters(self.model)
        if is_adapted(self.model):
            return merged(self.model, named)
        return ((name, parameter.detach()) for name, parameter in named)

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for a forward in `dtype`."""
        return self.parallel.autocast(self.model, self.dtype)

    def casting_once(self) -> AbstractContextManager[Any]:
        """A block of several micro-batches with gradients, in which autocast casts each weight once.

        Its cache lives as long as the outermost region, which here is switched off, so that nothing else is cast. Only
        where the backward pass of a micro-batch needs all casts anyway: otherwise they would take more memory. Compiled
        layers cast in their graphs.
        """
        return nullcontext() if self.recomputes else torch.autocast(self.model.device.type, enabled=False)

    @contextmanager
    def sampling_mode(self) -> Iterator[None]:
        """Evaluation mode without gradients, for any number of forwards in this process. Entering it is collective."""
        with self._evaluating(), self.parallel.sampling(self.model, self.dtype):
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if self.compiles else nullcontext():
            yield
        self.model.train(training)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1.

        Collective if weights are sharded.
        """
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with self._evaluating(), self.autocast():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float()
        logp: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return logp

    def scores(self, batch: MicroBatch, sampling: Sampling, entropy_gradient: bool = False) -> TokenScores:
        """Log-probs [B, T] of the completions under the sampling distribution, with gradient, and entropies, in nats.

        Calls `wrapped`: every process must call it equally often.
        """
        return completion_scores(self.wrapped, batch, sampling, self.autocast(), entropy_gradient, self.at_head)

    @torch.no_grad()
    def scores_without_gradient(self, batch: MicroBatch, sampling: Sampling) -> TokenScores:
        """Like `scores`, but without gradients and only in this process, or those that share its micro-batches."""
        return completion_scores(self.model, batch, sampling, self.autocast(), at_head=self.at_head)


class Reference:
    """A copy of the policy from the start of the run; `mix` moves it towards the policy if the KL part says so.

    It has full weights also with LoRA, because a mixture of low-rank updates has a higher rank than each.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model: Any = policy.parallel.prepare_frozen(model.eval(), policy.dtype)
        self.policy = policy

    @property
    def models(self) -> list[Any]:
        """The models in this process."""
        return [self.model]

    @property
    def at_head(self) -> bool:
        """As the policy's, whose architecture it has."""
        return self.policy.at_head

    @property
    def shared_with(self) -> ContextParallel | None:
        """As the policy's."""
        return self.policy.shared_with

    def score(self, micro_batch: RowBatch, batch: MicroBatch, sampling: Sampling) -> None:
        """Set `ref_logp` of a micro-batch. Collective if weights are sharded."""
        micro_batch.known["ref_logp"] = self.logp(batch, sampling)

    @torch.no_grad()
    def logp(self, batch: MicroBatch, sampling: Sampling) -> Tensor:
        """Log-probs [B, T] of the completions, in nats."""
        context = self.policy.parallel.autocast(self.model, self.policy.dtype)
        return completion_scores(self.model, batch, sampling, context, at_head=self.at_head).logp

    @torch.no_grad()
    def mix(self, alpha: float) -> None:
        """reference = alpha x policy + (1 - alpha) x reference, weight by weight; with LoRA, of the merged weights.

        TR-DPO (arXiv 2404.09656), equation 5.
        """
        reference = dict(self.model.named_parameters())
        for name, weight in self.policy.weights():
            reference.pop(name).lerp_(weight, alpha)
        if reference:
            raise ValueError(f"the policy has no weights called {', '.join(sorted(reference))}")


class BaseReference(Reference):
    """The policy with its LoRA updates switched off: a fixed reference without a second copy in memory.

    The updates start at 0, so it equals the policy at the start of the run to the bit.
    """

    def __init__(self, policy: Policy) -> None:
        self.model, self.policy = policy.model, policy

    def logp(self, batch: MicroBatch, sampling: Sampling) -> Tensor:
        """Log-probs [B, T] of the completions, in nats."""
        with switched_off(self.model):
            return super().logp(batch, sampling)
