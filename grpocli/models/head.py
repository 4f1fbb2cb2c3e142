"""model.head_dtype=float32: an output head that multiplies in float32 while the model computes in 16 bits.

    logits = float32(round(h)) float32(round(W))^T      round: to the dtype of the computation

The operands are rounded as in every other layer and in vLLM, which has products in float32 with
`--hf-overrides '{"head_dtype": "float32"}'`. W stays one float32 parameter, also when it is the embedding, and neither
its gradient nor that of logits is rounded. In a model that computes in float32 nothing changes, to the bit.
MiniMax-M1 (arXiv 2506.13585), section 3.2; ScaleRL (arXiv 2510.13786).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import ConfigError
from grpocli.models.frozen_linear import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Float32Head(torch.nn.Linear):
    """A layer of transformers becomes one by its class, so that names, tied weights and hooks stay."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits [..., V] in float32 of hidden states [..., H]."""
        bias_V = None if self.bias is None else rounded(self.bias)
        input, weight_VH = rounded(input), rounded(self.weight)
        with torch.autocast(input.device.type, enabled=False):
            return torch.nn.functional.linear(input, weight_VH, bias_V)


def rounded(tensor: Tensor) -> Tensor:
    """The tensor in float32, after rounding to the dtype that autocast computes in; its gradient is not rounded."""
    dtype = compute_dtype(tensor)
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


def product(a_NK: Tensor, b_KM: Tensor, on_cpu: bool) -> Tensor:
    """The product of two matrices, multiplied and summed in float32, which a GPU has for 16 bits. No gradient."""
    if not on_cpu and a_NK.dtype != torch.float32:
        return mm_into_float32(a_NK, b_KM)
    with torch.autocast(a_NK.device.type, enabled=False):
        return a_NK.float() @ b_KM.float()


def parts_(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two tensors of a shorter dtype whose sum is a float32 tensor, which is overwritten, up to 2^-16 of it."""
    high = tensor.to(dtype)
    return high, tensor.sub_(high).to(dtype)


def mm_into_float32(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """torch's product of matrices of 16 bits with a float32 result, which it has for GPUs only."""
    return torch.mm(a_NK, b_KM, out_dtype=torch.float32)


def widen_head(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose output head multiplies in float32. Raises ConfigError if the head is not a linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        problem = f"this model's output head is a {type(head).__name__}, not a linear layer: set it to null"
        raise ConfigError(problem, key="model.head_dtype", value="float32")
    head.__class__ = Float32Head
    return model
