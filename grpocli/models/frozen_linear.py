"""A frozen linear layer whose weight is computed when it is used: QLoRA's layers of 4 bits (arXiv 2305.14314).

    W = absmax [blocks of 64] x NF4 value of each number        4.5 bits a weight

bitsandbytes quantizes W. The layers multiply by W in the dtype of the computation, also without gradients, so a copy
of the model with these weights, which vLLM serves, is the same model (README.md). Scales are not quantized a second
time: their mean depends on the number of threads, so a resume could have other weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


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


class Nf4Linear(torch.nn.Linear):
    """A frozen linear layer with a weight of 4 bits. A layer of bitsandbytes becomes one by its class."""

    quant_state: Any

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b in the dtype of the computation."""
        return multiply(x, self)

    def dequantized(self) -> Tensor:
        """The weight [out, in] in the dtype in which it was loaded."""
        state, shape = self.quant_state, (self.out_features, self.in_features)
        # on a CPU bitsandbytes 0.50 takes wrong scales for rows that end within a block, but not for a single row
        rows = shape if self.in_features % state.blocksize == 0 else (1, self.out_features * self.in_features)
        weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            self.weight.data, state.absmax, state.blocksize, state.quant_type, rows, state.dtype
        )
        return weight.view(shape)


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model that transformers loaded with layers of bitsandbytes, as a plain one whose layers are `Nf4Linear`."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if type(module) is Linear4bit:
            module.quant_state = module.weight.quant_state
            module.__class__ = Nf4Linear
    for name in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_4bit_serializable"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # saved models have whole weights
    return model
