"""The base model of model.quantization with its weights as numbers: what vLLM serves below LoRA's adapters.

vLLM would quantize the base anew, with other kernels, and only on a GPU. The numbers are those that the trainer
multiplies by, so trainer and sampler are one model. They take the memory of an unquantized model, in vLLM.
"""

from __future__ import annotations

import gc
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpocli.cache import cached
from grpocli.distributed.world import World
from grpocli.models.loading import load_config, load_quantized, load_tokenizer

NEEDED = ("config.json", "tokenizer_config.json")


class _Alone(World):
    """A process that writes alone, before there are others."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


def dequantized_base(part: Any, path: str, dtype: str, device: str = "auto") -> str | None:
    """The folder of the model at `path` with the weights that its 4 bits stand for; None without model.quantization.

    It is made once, in the cache. dtype: of the computation. device: `hardware.device`, on which it is quantized.
    """
    import torch

    if not getattr(part, "quantization", None):
        return None
    device = "cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"
    name = f"models/nf4-{_identity(part, path, dtype, device)}"
    return str(cached(name, NEEDED, lambda folder: _write(part, path, dtype, device, folder)))


def _write(part: Any, path: str, dtype: str, device: str, folder: Path) -> None:
    import torch

    from grpocli.models.lora import merged
    from grpocli.training.checkpoint import save_weights

    model = load_quantized(part, path, dtype, device)
    save_weights(model, folder, merged(model, model.named_parameters()), _Alone(), getattr(torch, dtype))
    load_tokenizer(part, path).save_pretrained(folder)
    del model
    gc.collect()


def _identity(part: Any, path: str, dtype: str, device: str) -> str:
    """A hash of what determines the weights: the base's files or commit, dtype, device and versions of libraries."""
    folder = Path(path)
    if folder.is_dir():
        files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
        base: Any = [str(folder.resolve()), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]
    else:
        base = [path, load_config(part, path)._commit_hash, getattr(part, "revision", None)]
    libraries = [version(name) for name in ("torch", "transformers", "bitsandbytes")]
    return hashlib.sha256(json.dumps([base, dtype, device, libraries]).encode()).hexdigest()[:16]
