"""model.head_dtype=float32: an output head that multiplies in float32 while the model computes in bfloat16.

    logits = float32(hidden) float32(round(W))^T        round: to the dtype of the computation, as for any other layer

W stays one parameter in float32, also when it is the embedding. It is rounded because vLLM holds rounded weights: then
both sample from the same weights, and differ by the rounding of hidden states alone. (ScaleRL, arXiv 2510.13786;
MiniMax-M1, arXiv 2506.13585.) In a model that computes in float32 nothing changes, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Float32Head(torch.nn.Linear):
    """A linear layer with logits in float32, from weights in the dtype of the computation.

    A layer of transformers becomes one by its class, so that names, tied weights and hooks stay.
    """

    _keeps = False
    _kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Logits [..., V] in float32 of hidden states [..., H]."""
        weight_VH = self._kept
        if weight_VH is None:
            weight_VH = rounded(self.weight)
            self._kept = weight_VH.detach() if self._keeps else None
        bias_V = None if self.bias is None else rounded(self.bias)
        with torch.autocast(input.device.type, enabled=False):
            return torch.nn.functional.linear(input.float(), weight_VH, bias_V)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """A block without gradients and updates in which the weight is cast once, not for every token."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None


def rounded(tensor: Tensor) -> Tensor:
    """The tensor in float32, after rounding to the dtype that autocast computes in; its gradient is not rounded."""
    device = tensor.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
    if dtype == torch.float32:
        return tensor
    wide: Tensor = _Rounded.apply(tensor, dtype)  # type: ignore[no-untyped-call]
    return wide


class _Rounded(torch.autograd.Function):
    """`tensor.to(dtype).float()`, whose gradient torch would round to `dtype`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def widen_head(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose output head multiplies in float32. Raises ConfigError if the head is not a linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        problem = f"this model's output head is a {type(head).__name__}, not a linear layer: set it to null"
        raise ConfigError(problem, key="model.head_dtype", value="float32")
    head.__class__ = Float32Head
    return model


@contextmanager
def weights_kept(model: torch.nn.Module) -> Iterator[None]:
    """A block without gradients and updates in which a `Float32Head` casts its weight once."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Float32Head):
                stack.enter_context(module.keeping())
        yield
