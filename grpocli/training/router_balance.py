"""The routers of a mixture of experts, their load-balancing loss, and the load of the experts.

    B(θ) = 1/N Σ_i 1/L Σ_l E Σ_e f_ile P_ile
    f_ile = 1/T_i Σ_t [e is among the K experts of token t in layer l]      no gradient
    P_ile = 1/T_i Σ_t softmax(router logits of token t in layer l)_e

i: the N completions of the update with a token in the loss; t: the T_i tokens of o_i and its prompt, without padding;
l: the L layers with E experts. It is K if each expert gets an equal share of every completion's tokens, and at most E.

That is the loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6) for K experts, in the sequence-wise form of
DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20; theirs is divided by K and summed over layers). Logits are read with
hooks, since `output_router_logits=True` makes its own loss from a mask that packed rows do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.distributed.world import World
    from grpocli.training.packing import MicroBatch


class Router(NamedTuple):
    """The router of one layer."""

    module: torch.nn.Module
    output: int
    """The number of its output that is the logits."""


class Routing(NamedTuple):
    """What a router says about N tokens."""

    logits: Tensor
    """[N, E], with gradient."""
    chosen: Tensor
    """[N, K]: the experts of each token."""


def routers(model: Any) -> list[Router]:
    """The routers for which transformers defines a load-balancing loss, in the order of the layers; none if dense."""
    from transformers import PreTrainedModel

    if not hasattr(model.config.get_text_config(), "router_aux_loss_coef"):
        return []
    found = {}
    for part in model.modules():
        recorder: Any = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if not isinstance(part, PreTrainedModel) or not hasattr(recorder, "target_class"):
            continue
        for name, module in part.named_modules():
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                found[module] = Router(module, recorder.index)
    return list(found.values())


def check_has_routers(part: Any, path: str, coefficient: float) -> None:
    """Raise ConfigError if the model at `path` has no routers to balance. Reads its config alone."""
    from grpocli.models.loading import model_without_weights

    model = model_without_weights(part, path)
    if not routers(model):
        kind = model.config.get_text_config().model_type
        problem = f"transformers has no load-balancing loss for this model ({kind}), which has no softmax routers"
        raise ConfigError(problem, key="algorithm.router_aux_loss_coef", value=coefficient, hint="leave it at 0")


@contextmanager
def record_routings(found: list[Router]) -> Iterator[list[Routing]]:
    """A block whose list has the routings of the forward pass in it.

    The hooks only keep tensors: under gradient checkpointing, an operation in a hook would be missing when the layer is
    computed again.
    """
    outputs: list[Routing] = []

    def keep(number: int, module: torch.nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        chosen = next(tensor for tensor in output if not tensor.is_floating_point())
        outputs.append(Routing(output[number], chosen))

    handles = [module.register_forward_hook(partial(keep, number)) for module, number in found]
    yield outputs
    for handle in handles:
        handle.remove()


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
    """The loss term and the metrics of a model's routers; without effect for a dense model."""

    routers: list[Router]
    coefficient: float = 0.0
    """`algorithm.router_aux_loss_coef`."""
    sums: list[Tensor] = field(default_factory=list)
    """Of the step so far: the losses, their number, and the tokens of each expert in each layer."""

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
        """B(θ) over the completions of the step, and the largest load of an expert, in equal shares. Collective."""
        if not self.sums:
            return {}
        flat = world.sum(torch.cat([one.flatten() for one in self.sums]))
        loss, rows, counts_LE = flat[0], flat[1], flat[2:].view_as(self.sums[2])
        if not rows:
            return {}
        load_LE = counts_LE / counts_LE.mean(1, keepdim=True)
        return {"router/aux_loss": (loss / rows).item(), "router/max_load": load_LE.max().item()}
