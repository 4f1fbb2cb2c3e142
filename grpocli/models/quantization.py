"""bitsandbytes: weights in 4 bits, and optimizers with states in 8."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

NF4 = "nf4"
NF4_BYTES = 0.5 + 4 / 64
"""Bytes of a weight: 4 bits, and a float32 scale for 64 weights."""
INSTALL = "pip install '.[bitsandbytes]' in a clone of grpocli"

# On a CPU it warns at every import that it has no kernels from the hub, which are not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def check_bitsandbytes(key: str, value: str) -> None:
    """Raise ConfigError if bitsandbytes is not installed. Does not import it."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError("needs bitsandbytes, which is not installed", key=key, value=value, hint=INSTALL)


def whole_weight(layer: Any) -> Tensor:
    """The weight of a linear layer, of 4 bits or not, as numbers."""
    weight: Tensor = layer.dequantized() if hasattr(layer, "dequantized") else layer.weight.detach()
    return weight


def quantized_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers with weights of 4 bits, by name."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "dequantized"))
