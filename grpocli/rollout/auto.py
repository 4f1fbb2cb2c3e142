"""engine=auto: vLLM if there is a GPU and vLLM is installed, else transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from grpocli.config.parts import part
from grpocli.rollout.engine import EnginePart

if TYPE_CHECKING:
    from grpocli.rollout.engine import Engine, EngineContext, EngineJob


@part("engine", "auto")
class AutoEngine(EnginePart):
    """vLLM if it is installed and there is a GPU, else transformers.

    Choose an engine by name to set its keys.
    """

    overlaps = True  # checked again for the resolved engine

    def resolved(self) -> EnginePart:
        """The choice for this machine. Imports torch, which is slow."""
        from importlib.util import find_spec

        import torch

        if torch.cuda.is_available() and find_spec("vllm") is not None:
            from grpocli.rollout.vllm.engine_parts import Vllm

            return Vllm()
        from grpocli.rollout.transformers_engine import Transformers

        return Transformers()

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        return self.resolved().launch(job)

    def connect(self, context: EngineContext) -> Engine:
        return self.resolved().connect(context)
