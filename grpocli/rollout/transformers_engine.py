"""engine=transformers: each trainer process samples with the policy itself. engine=auto: that, or vLLM on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import part, require
from grpocli.rollout.engine import Engine, EnginePart, Listener, ignore_group
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.rollout.engine import EngineContext, OnGroup, PolicyView


VLLM_START = 50.0
"""Seconds until vLLM is ready, at least: on an H100 49 (eager, its libraries in memory) to 97 (compiled)."""
FORWARD = 0.025
"""Seconds of transformers for one more token of all rows: on an H100 about 1 ms a layer, and most models have 24."""


@part("engine", "transformers")
class Transformers(EnginePart):
    """Samples with transformers in the trainer process."""

    max_rows: int = 256
    """Maximum number of completions sampled at once; bounds memory. Also the maximum number whose KV cache is kept
    between turns of an episode."""

    def __post_init__(self) -> None:
        require(self, "max_rows", self.max_rows >= 1, "must be at least 1")

    def connect(self, context: EngineContext) -> Engine:
        from grpocli.rollout.sampling import stop_token_ids  # imports torch

        ids = stop_token_ids(context.policy.model, context.tokenizer)
        return TransformersEngine(context.policy, ids, self.max_rows, context.tokenizer)


class TransformersEngine(Engine):
    """The engine of `engine=transformers`, see `Transformers`."""

    def __init__(self, policy: PolicyView, stop_token_ids: Sequence[int], max_rows: int, tokenizer: Any) -> None:
        self.policy, self.stop_token_ids, self.max_rows, self.tokenizer = policy, stop_token_ids, max_rows, tokenizer
        self.version = 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order."""
        from grpocli.rollout.sampler import float32_attention, sample
        from grpocli.rollout.sampling import single_thread_if_small

        listener = Listener.wrap(on_group)
        sampled, total = 0, sum(request.n for request in requests)
        results: list[list[Completion]] = [[] for _ in requests]
        chunks = self._chunks(requests)
        requests = self._limit_reuse(requests, chunks)
        with self.policy.sampling_mode(), float32_attention(self.policy.model):
            for chunk in chunks:
                chunk_requests = [requests[i] for i in chunk]
                rows = sum(request.n for request in chunk_requests)
                watch, model = listener.watch.part(sampled, total), self.policy.model
                own = self.stop_token_ids, self.version, self.tokenizer
                with single_thread_if_small(model, rows):
                    done = sample(model, chunk_requests, sampling, *own, watch)
                sampled += rows
                if watch.cancelled():
                    break
                for i, completions in zip(chunk, done, strict=True):
                    results[i] = completions
                    # a group is reported early only if others are sampled meanwhile
                    if len(chunk_requests) < len(requests):
                        listener(i, completions)
        return results

    def _chunks(self, requests: Sequence[Request]) -> list[list[int]]:
        """Group prompts of similar length into chunks of at most `max_rows` completions, and at least one prompt.

        Requests with cached rows come first, in separate chunks, because these compute only their new tokens.
        """
        from grpocli.rollout.sampler import can_reuse

        from_scratch = [not can_reuse(request, self.version) for request in requests]
        chunks: list[list[int]] = []
        rows = self.max_rows
        for i in sorted(range(len(requests)), key=lambda i: (from_scratch[i], len(requests[i].token_ids))):
            if rows + requests[i].n > self.max_rows or from_scratch[i] != from_scratch[chunks[-1][0]]:
                chunks.append([])
                rows = 0
            chunks[-1].append(i)
            rows += requests[i].n
        return chunks

    def _limit_reuse(self, requests: Sequence[Request], chunks: Sequence[Sequence[int]]) -> list[Request]:
        """The requests, with `reusable_kv` only for the first `max_rows` completions that are sampled."""
        found, room = list(requests), self.max_rows
        for i in (i for chunk in chunks for i in chunk):
            room -= len(requests[i].reusable_kv)
            if room < 0:
                found[i] = replace(requests[i], reusable_kv=())
        return found

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def close(self) -> None:
        """Do nothing: there is no process to stop."""


@part("engine", "auto")
class AutoEngine(EnginePart):
    """vLLM if it is installed and there is a GPU, except for short runs on a single GPU, else transformers.

    A run is short if transformers samples all of it before vLLM would be ready. Choose an engine by name to set its
    keys.
    """

    def check_run(self, run: Run) -> None:
        """Nothing: its choice is checked when this machine is known."""

    def resolved(self) -> EnginePart:
        """The choice for this machine. Imports torch, which is slow."""
        from importlib.util import find_spec

        import torch

        if torch.cuda.is_available() and find_spec("vllm") is not None:
            from grpocli.rollout.vllm.engine_parts import Vllm

            return Vllm()
        return Transformers()

    def for_run(self, run: Run, note: Callable[[str], None]) -> EnginePart:
        """The choice for a run on this machine. note: told why a run does not wait for vLLM."""
        from grpocli.hardware import visible_gpus

        engine, seconds = self.resolved(), seconds_by_transformers(run)
        if isinstance(engine, Transformers) or len(visible_gpus()) > 1 or seconds >= VLLM_START:
            return engine
        note(f"engine=auto chose transformers: it samples this run in about {seconds:.0f} s, vLLM starts in 50 to 100")
        return Transformers()


def seconds_by_transformers(run: Run) -> float:
    """About how long transformers, in one process, samples all of a run on a GPU; infinite if only vLLM can."""
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
