"""Routers of mixtures of experts: which modules of a model they are, and what they choose in a forward pass.

transformers lists the modules whose outputs are `router_logits` for each architecture. They are read with hooks, since
`output_router_logits=True` makes its own loss from a mask that packed rows do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEY = "algorithm.router_aux_loss_coef"


@dataclass(frozen=True, slots=True)
class Router:
    """The router of one layer. index: of the logits in its output."""

    module: torch.nn.Module
    index: int


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router says about N tokens. logits [N, E], with gradient; chosen [N, K]: the experts of each token."""

    logits: Tensor
    chosen: Tensor


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
        raise ConfigError(problem, key=KEY, value=coefficient, hint="leave it at 0")


@contextmanager
def recorded(found: list[Router]) -> Iterator[list[Routing]]:
    """A block whose list has the routings of the forward pass in it.

    The hooks only keep tensors: under gradient checkpointing, an operation in a hook would be missing when the layer is
    computed again.
    """
    outputs: list[Routing] = []

    def hook_of(router: Router) -> Any:
        def keep(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
            chosen = next(tensor for tensor in output if not tensor.is_floating_point())
            outputs.append(Routing(output[router.index], chosen))

        return keep

    with ExitStack() as stack:
        for router in found:
            stack.callback(router.module.register_forward_hook(hook_of(router)).remove)
        yield outputs
