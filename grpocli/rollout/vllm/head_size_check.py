"""Whether vLLM's attention on a CPU has a kernel for a model's heads: without one it dies at the first completion."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError

SIZES = re.compile(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", re.DOTALL)


def check_head_size(model_path: str) -> None:
    """Raise ConfigError for a model in a folder whose head size vLLM's CPU backend does not list."""
    size, known = head_size(model_path), cpu_head_sizes()
    if size is not None and known and size not in known:
        raise ConfigError(
            f"engine=vllm: the model's heads have size {size}, and vLLM on a CPU serves {', '.join(map(str, known))}: "
            "take engine=transformers"
        )


def head_size(model_path: str) -> int | None:
    """From the model's config; None where that is not here, or says it in another way."""
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if hidden and heads and "kv_lora_rank" not in config else None


def cpu_head_sizes() -> list[int]:
    """As the installed vLLM's source has them, since importing it takes seconds; empty where it has no such list."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return []
    source = Path(package.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    found = SIZES.search(source.read_text()) if source.is_file() else None
    return [int(word) for word in found[1].split(",") if word.strip()] if found else []
