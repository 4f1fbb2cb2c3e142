"""The choices `engine=vllm` and `engine=vllm_colocate`. Their keys are in `config.py`, their engines load later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from grpocli.config.parts import part
from grpocli.rollout.vllm.config import ColocateOptions, VllmOptions

if TYPE_CHECKING:
    from grpocli.rollout.engine import Engine, EngineContext, EngineJob


@part("engine", "vllm")
class Vllm(VllmOptions):
    """A vLLM server: the run's own, or the one at `base_url` (started with `grpocli vllm-serve`)."""

    overlaps = constrains = True

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        from grpocli.rollout.vllm.supervisor import launch

        return launch(self, job)

    def connect(self, context: EngineContext) -> Engine:
        from grpocli.rollout.vllm.engine import connect

        return connect(self, context)


@part("engine", "vllm_colocate")
class VllmColocate(ColocateOptions):
    """vLLM with a whole model in every trainer process, which loads the trainer's weights directly."""

    constrains = True

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        """Check the room before the model is loaded. Raises ConfigError."""
        self.check_room(job)
        return nullcontext()

    def connect(self, context: EngineContext) -> Engine:
        from grpocli.rollout.vllm.colocate import connect

        return connect(self, context)
