"""The little models of many tests: their sizes, and their special tokens."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ENDS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
