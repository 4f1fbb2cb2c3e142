"""The load-balancing loss of a mixture of experts, and the load of its experts.

    B(θ) = 1/N Σ_i 1/L Σ_l E Σ_e f_ile P_ile
    f_ile = 1/T_i Σ_t [e is among the K experts of token t in layer l]      no gradient
    P_ile = 1/T_i Σ_t softmax(router logits of token t in layer l)_e

i: the N completions of the update with a token in the loss; t: the T_i tokens of o_i and its prompt, without padding;
l: the L layers with E experts. It is K if each expert gets an equal share of every completion's tokens, and at most E.

That is the loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), for K experts as transformers and TRL have
it, in the sequence-wise form of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20; theirs is divided by K and summed
over layers). The form over a batch is a product of two sums over tokens, so that its value depends on which tokens
share a micro-batch, and gradient accumulation does not add up to it. A completion is never split, so this one does not
depend on micro-batches, packing or processes. Over a batch f would need a forward pass of all rows before the update.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from grpocli.models.routers import Router, Routing, recorded, routers

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.distributed.world import World
    from grpocli.training.micro_batch import MicroBatch


def balance(routings: list[Routing], batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The loss of each row [B], and how many of its tokens chose each expert, [B, layers, E], both in float32.

    Sums over a row's tokens are matrix products, since adding at indices has no fixed order on a GPU.
    """
    losses, counts = [], []
    member_BN = batch.layout.members()  # once for all layers: it is copied to the GPU
    tokens_B1 = batch.layout.total(member_BN.sum(1, keepdim=True))
    for one in routings:
        probs_NE = one.logits.float().softmax(-1)
        chosen_NE = torch.zeros_like(probs_NE).scatter_(1, one.chosen, 1.0)
        sums_B2E = batch.layout.total(member_BN @ torch.cat([probs_NE, chosen_NE], 1))
        probs_BE, count_BE = sums_B2E.chunk(2, 1)
        losses.append(probs_BE.shape[1] * (count_BE / tokens_B1 * (probs_BE / tokens_B1)).sum(1))
        counts.append(count_BE)
    return torch.stack(losses).mean(0), torch.stack(counts, 1)


@dataclass(slots=True)
class RouterBalance:
    """The loss term and the metrics of a model's routers; without effect for a dense model.

    coefficient: `algorithm.router_aux_loss_coef`. sums: of the step so far: the losses, their number, and the tokens of
    each expert in each layer.
    """

    routers: list[Router]
    coefficient: float = 0.0
    sums: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, coefficient: float) -> RouterBalance:
        return cls(routers(model), coefficient)

    def begin_step(self) -> None:
        self.sums = []

    def recording(self) -> AbstractContextManager[list[Routing]]:
        """A block around the forward pass of a micro-batch."""
        return recorded(self.routers)

    def loss(self, routings: list[Routing], batch: MicroBatch, rows: int) -> Tensor | None:
        """The micro-batch's share of coefficient x B(θ); None if there is none. rows: N of the whole update."""
        if not self.routers:
            return None
        trained_B = batch.mask.any(1)
        loss_B, count_BLE = balance(routings, batch)
        sums = [
            (loss_B.detach() * trained_B).sum(),
            trained_B.sum().float(),
            (count_BLE * trained_B[:, None, None]).sum(0),
        ]
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums
        return self.coefficient * (loss_B * trained_B).sum() / max(rows, 1) if self.coefficient else None

    def metrics(self, world: World) -> dict[str, float]:
        """Means over the computed completions of all updates of the step. Collective.

        router/aux_loss: B(θ). router/max_load: the largest number of tokens of an expert, as a multiple of an equal
        share.
        """
        if not self.sums:
            return {}
        loss, rows, counts_LE = self.sums
        flat = world.sum(torch.cat([torch.stack([loss, rows]), counts_LE.flatten()]))
        loss, rows, counts_LE = flat[0], flat[1], flat[2:].view_as(counts_LE)
        if not rows:
            return {}
        load_LE = counts_LE / counts_LE.mean(1, keepdim=True)
        return {"router/aux_loss": (loss / rows).item(), "router/max_load": load_LE.max().item()}
