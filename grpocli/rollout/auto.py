"""engine=auto: vLLM where there is a GPU and vLLM is installed, else transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from grpocli.config.parts import part

if TYPE_CHECKING:
    from grpocli.rollout.engine import Engine, EngineContext, EngineJob, EnginePart


@part("engine", "auto")
class AutoEngine:
    """vLLM if it is installed and there is a GPU, else transformers.

    Choose an engine by name to set its keys.
    """

    overlaps = True  # some choice does; at the launch the chosen one is asked

    def chosen(self, apart: bool = False) -> EnginePart:
        """apart: vLLM has GPUs of its own."""
        from importlib.util import find_spec

        import torch

        if torch.cuda.is_available() and find_spec("vllm") is not None:
            from grpocli.rollout.vllm.engine_parts import Vllm

            return Vllm(gpu_memory_utilization=0.9 if apart else 0.4)  # the trainer needs the rest of a shared GPU
        from grpocli.rollout.transformers_engine import Transformers

        return Transformers()

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        return self.chosen(apart=job.transport == "nccl").launch(job)  # which joins no GPU with itself

    def connect(self, context: EngineContext) -> Engine:
        return self.chosen().connect(context)


def chosen(engine: EnginePart) -> EnginePart:
    """What samples: the engine of the config, or the one that `auto` turns out to be here. Imports torch."""
    return engine.chosen() if isinstance(engine, AutoEngine) else engine
