"""How many threads sample on a CPU: one, where a token's products are too small to share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL = 10_000_000
"""Multiplications of a layer for one token of every row; below that, threads wait for each other longer than they work.

Measured with two threads; with more there is more to wait for.
"""


@contextmanager
def threads_for(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """While `rows` completions are sampled side by side."""
    before = torch.get_num_threads()
    if model.device.type != "cpu" or before == 1 or rows * _layer(model) > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _layer(model: PreTrainedModel) -> int:
    """Parameters, the model's by its layers. DeepSpeed's are empty while they are elsewhere, and know their size."""
    total = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return int(total // (getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1))
