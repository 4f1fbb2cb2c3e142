"""Products with the weight of a frozen linear layer that is computed when it is used, and not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def multiply(x: Tensor, layer: Any) -> Tensor:
    """x W^T + b in the dtype of the computation. layer: linear, with `dequantized`, which computes W [out, in]."""
    product: Tensor = _Product.apply(x, layer)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """Computes the weight again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        weight_OI = layer.dequantized().to(compute_dtype(x))
        bias_O = None if layer.bias is None else layer.bias.to(weight_OI.dtype)
        return torch.nn.functional.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.dequantized().to(gradient.dtype), None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are computed: that of autocast, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
