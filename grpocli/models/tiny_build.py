"""model=tiny from nothing to a folder in the cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import grpocli
from grpocli.models.cache import cached
from grpocli.tasks.arithmetic import Arithmetic

if TYPE_CHECKING:
    from grpocli.models.common import Progress
    from grpocli.models.tiny import Tiny

SEED = 0
SOURCES = (
    "models/tiny_build.py",
    "models/tiny_parts.py",
    "models/warm_start.py",
    "models/muon.py",
    "tasks/arithmetic.py",
    "tasks/generated.py",
)
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cached_tiny(part: Tiny, progress: Progress | None = None) -> Path:
    """The folder of this part's model: the cached one, or one made now."""
    return cached(f"models/tiny-{content_hash(part)}", NEEDED, lambda folder: build(part, folder, progress))


def content_hash(part: Tiny) -> str:
    """Over everything that the weights depend on: settings, libraries and the code itself."""
    import torch
    import transformers

    package = Path(grpocli.__file__).parent
    settings = {
        "digits": part.digits,
        "operation": part.operation,
        "steps": part.warm_start_steps,
        "noise": part.noise,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sources": [hashlib.sha256((package / name).read_bytes()).hexdigest() for name in SOURCES],
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def build(part: Tiny, folder: Path, progress: Progress | None = None) -> None:
    """Make, warm-start and save the model and its tokenizer."""
    from grpocli.models.tiny_parts import make_model, make_tokenizer
    from grpocli.models.warm_start import warm_start

    model, tokenizer = make_model(SEED), make_tokenizer()
    examples = Arithmetic(digits=part.digits, operation=part.operation).examples("train")
    warm_start(model, tokenizer, examples, part.warm_start_steps, part.noise, SEED, progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
