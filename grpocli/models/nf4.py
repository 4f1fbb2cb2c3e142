"""Linear layers with weights of 4 bits: QLoRA's base model (arXiv 2305.14314), quantized by bitsandbytes.

    W = absmax [blocks of 64] x NF4 value of each number        4.5 bits a weight

The layers multiply by W in the dtype of the computation, in every forward alike, with gradients and without. So a copy
of the model with these weights, which vLLM serves, is the same model. bitsandbytes' own layer has other kernels without
gradients, which round differently, and on a CPU repacks its weights for them for good. Scales are not quantized a
second time: their mean depends on the number of threads, so a resume could have other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from bitsandbytes.nn import Linear4bit
from transformers import BitsAndBytesConfig

from grpocli.models.frozen_linear import multiply

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def config() -> BitsAndBytesConfig:
    """The quantization with which transformers loads every linear layer but the output head."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False)


class Nf4Linear(Linear4bit):  # type: ignore[misc]
    """A frozen linear layer with a weight of 4 bits. A layer of bitsandbytes becomes one by its class."""

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


def settled(model: PreTrainedModel) -> PreTrainedModel:
    """The model that transformers loaded with `config`, as a plain one whose layers are `Nf4Linear`."""
    for module in model.modules():
        if type(module) is Linear4bit:
            module.__class__ = Nf4Linear
            module.quant_state = module.weight.quant_state
    for name in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_4bit_serializable"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # saved models have whole weights
    return model


def layers(model: torch.nn.Module) -> Iterator[tuple[str, Nf4Linear]]:
    """The quantized layers by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Nf4Linear))
