"""engine=auto: vLLM if there is a GPU, vLLM is installed and its start is worth the wait, else transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpocli.config.parts import part
from grpocli.rollout.engine import EnginePart

if TYPE_CHECKING:
    from grpocli.config.schema import Run

VLLM_START = 50.0
"""Seconds until vLLM is ready, at least: on an H100 49 (eager, its libraries in memory) to 97 (compiled)."""
FORWARD = 0.025
"""Seconds of transformers for one more token of all rows: on an H100 about 1 ms a layer, and most models have 24."""


@part("engine", "auto")
class AutoEngine(EnginePart):
    """vLLM if it is installed and there is a GPU, except for short runs on a single GPU, else transformers.

    A run is short if transformers samples all of it before vLLM would be ready. Choose an engine by name to set its
    keys.
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

    def for_run(self, run: Run, note: Callable[[str], None]) -> EnginePart:
        """The choice for a run on this machine. note: told why a run does not wait for vLLM."""
        from grpocli.hardware import visible_gpus
        from grpocli.rollout.transformers_engine import Transformers

        engine, seconds = self.resolved(), seconds_by_transformers(run)
        if isinstance(engine, Transformers) or len(visible_gpus()) > 1 or seconds >= VLLM_START:
            return engine
        note(f"engine=auto chose transformers: it samples this run in about {seconds:.0f} s, vLLM starts in 50 to 100")
        return Transformers()


def seconds_by_transformers(run: Run) -> float:
    """About how long transformers, in one process, samples all of a run on a GPU; infinite if only vLLM can."""
    from grpocli.rollout.transformers_engine import Transformers

    hardware, rollout, evaluation, at_once = run.hardware, run.rollout, run.eval, Transformers().max_rows
    alone = hardware.nodes == 1 and (hardware.processes or 1) == 1 and hardware.rollout_devices == "auto"
    if not alone or rollout.max_staleness or rollout.sampling.structure:
        return math.inf
    sampled = 0 if run.algorithm.supervised else rollout.prompts_per_step * rollout.group_size
    evaluated = evaluation.n_problems(cpu=False) * (evaluation.samples + 1)
    evaluations = 2 + (run.train.steps // evaluation.every if evaluation.every else 0)
    sampled *= min(2, run.algorithm.keep.max_rounds)  # few steps refill more often
    batches = run.train.steps * math.ceil(sampled / at_once) + evaluations * math.ceil(evaluated / at_once)
    return float(FORWARD * batches * rollout.max_completion_tokens)
