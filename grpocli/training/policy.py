"""The policy, which is trained, and the reference, which a KL term pulls it towards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


LEAST_OFFLOADED = 2**20
"""Bytes of the smallest tensor that an `ActivationOffload` moves."""


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
        self.recomputes = self.offloads = False
        """Whether the backward pass computes activations again, and whether they wait for it in the CPU's memory."""
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
        lean = self.recomputes or self.offloads
        return nullcontext() if lean else torch.autocast(self.model.device.type, enabled=False)

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
        with ActivationOffload(self.model.parameters()) if self.offloads else nullcontext():
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


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """train.activation_offload: a block in which the large tensors that autograd keeps wait in the CPU's memory.

    They are moved back for the backward pass. torch's `save_on_cpu` would move weights, too. Copies go through pinned
    memory, in the order of the GPU's other work, so the CPU does not wait for them.
    """

    def __init__(self, weights: Iterable[Tensor], devices: tuple[str, ...] = ("cuda",)) -> None:
        """weights: tensors that stay. devices: the kinds of devices that are relieved."""
        self.devices, self.moved = devices, 0
        self.stays = {_storage(weight) for weight in weights}
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        """What is kept of a tensor."""
        if not self.moves(tensor):
            return tensor
        self.moved += 1
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def moves(self, tensor: Tensor) -> bool:
        """Whether a tensor is moved: a large one of these devices that is no weight."""
        large = tensor.numel() * tensor.element_size() >= LEAST_OFFLOADED
        return large and tensor.device.type in self.devices and _storage(tensor) not in self.stays

    def unpack(self, kept: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        """The tensor, on its device."""
        return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)


def _storage(tensor: Tensor) -> int:
    """A number of the tensor's memory, which views share."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage()._cdata)
