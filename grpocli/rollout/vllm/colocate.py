"""engine=vllm_colocate in a trainer process: completions, sync and its proof."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.engine import ignore
from grpocli.rollout.transformers_engine import stop_ids
from grpocli.rollout.vllm.probe import Probe
from grpocli.rollout.vllm.request import check_temperature, completions, sampling_params
from grpocli.rollout.vllm.server import on_cpu
from grpocli.rollout.vllm.transport import Weights
from grpocli.rollout.vllm.validate import check_room, check_sampling, check_vllm
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, EngineJob, OnGroup
    from grpocli.rollout.vllm.config import ColocateOptions
    from grpocli.rollout.vllm.llm import Inside


class ColocateEngine:
    """See `ColocateOptions`. Every process has the whole model, samples its share and syncs itself."""

    def __init__(self, server: Inside, context: EngineContext) -> None:
        self.server, self.policy, self.world = server, context.policy, context.world
        self.weights = Weights(context.policy, server.dtype)
        self.probe = Probe(context)
        self.version: int | None = None
        self._stop = stop_ids(self.policy.model, context.tokenizer)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order; raises EngineError if any cannot be had."""
        if self.version is None:
            raise EngineError("engine=vllm_colocate starts without weights: sync before the first completion")
        check_temperature(sampling)
        if self.server.asleep:
            self._load(self.version)  # sleep has discarded the weights, and the policy's are still those of the sync
        parameters = [sampling_params(request, sampling, self._stop) for request in requests]
        answers = self.server.complete([request.token_ids for request in requests], parameters)
        self.server.sleep()
        return [
            completions(choices, request, sampling, self.version)
            for choices, request in zip(answers, requests, strict=True)
        ]

    def sync(self, version: int) -> dict[str, float]:
        """Load the policy's weights and prove it, in every process; all fail together."""
        sent, failure = 0, ""
        try:
            sent = self._load(version)
            self._verify(version)
        except EngineError as error:
            failure = str(error)
        failures = [said for said in self.world.gather_objects([failure]) if said]
        if failures:
            raise EngineError(failures[0])
        self.version = version
        return {"sync/bytes": float(sent)}

    def _load(self, version: int) -> int:
        stream = self.weights.stream()
        try:
            return self.server.load(stream, version)
        finally:
            if self.weights.sharded:
                for _ in stream:  # gathers are collective: also after a failure in this process
                    pass

    def _verify(self, version: int) -> None:
        echoed = self.server.weight_version()
        if echoed != str(version):
            raise EngineError(f"after a sync vLLM has weight version {echoed}, the trainer {version}")
        if self.probe.due():
            ids = self.probe.token_ids
            self.probe.compare(self.server.score(ids), self.policy.score(ids), version)

    def close(self) -> None:
        self.server.close()


@contextlib.contextmanager
def launch(options: ColocateOptions, job: EngineJob) -> Iterator[None]:
    """Check what can be known before the model is loaded. Raises ConfigError."""
    check_vllm("vllm_colocate")
    check_room(options.max_model_len, job)
    if options.sleep and on_cpu():
        raise ConfigError(
            "vLLM can give back a GPU's memory only; leave it null on a CPU", key="engine.sleep", value=True
        )
    if options.vllm_args:
        from grpocli.rollout.vllm.llm import check_arguments

        check_arguments(options.vllm_args)
    yield


def connect(options: ColocateOptions, context: EngineContext) -> ColocateEngine:
    """Start vLLM in this process; collective, because several of them make process groups together."""
    from grpocli.rollout.vllm.llm import start

    if context.sampling:
        check_temperature(context.sampling)
    server = start(options, context.job, context.world)
    if context.sampling:
        check_sampling(
            context.sampling,
            lambda request, sampling: server.complete([request.token_ids], [sampling_params(request, sampling, [])]),
        )
    return ColocateEngine(server, context)
