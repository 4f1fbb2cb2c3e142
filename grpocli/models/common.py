"""What every choice of the config group `model` has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from grpocli.config.parts import one_of, section
from grpocli.models.lora import Lora

Progress = Callable[[float, str], None]
"""Called with a fraction from 0 to 1 and a phrase for the user."""


@section("model")
class ModelPart:
    """dtype: what the model computes in, `float32`, `bfloat16`, or `auto`: whichever is faster on this machine.

    attn_implementation: of transformers, such as `sdpa` or `flash_attention_2` (null: its own choice).
    lora: train low-rank updates instead of all weights, where `lora.rank` is above 0.
    """

    dtype: str = "auto"
    attn_implementation: str | None = None
    lora: Lora = Lora()

    def __post_init__(self) -> None:
        one_of(self, "dtype", ("auto", "float32", "bfloat16"))


class Preparable(Protocol):
    """A choice of the config group `model`."""

    dtype: str
    attn_implementation: str | None
    lora: Lora

    def prepare(self, progress: Progress | None = None) -> str:
        """A local folder, or a hub id, that transformers and vLLM load.

        Called once, before any trainer process. Raises ConfigError, naming the key, where there is no model.
        """
        ...
