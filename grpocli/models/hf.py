"""model=hf."""
from __future__ import annotations
from omegaconf import MISSING
from grpocli.config.parts import part

@part("model", "hf")
class HuggingFace:
    path: str = MISSING
    dtype: str = "auto"
    attn_implementation: str | None = None
    def prepare(self, progress=None) -> str:
        return self.path
