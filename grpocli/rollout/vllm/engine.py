"""engine=vllm in a trainer process: completions from the server, weights to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpocli.data import Completion, Request, Sampling
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.transformers_engine import stop_ids
from grpocli.rollout.vllm.client import Client
from grpocli.rollout.vllm.endpoint import Endpoint, run_file
from grpocli.rollout.vllm.request import body, completions
from grpocli.rollout.vllm.sync import WeightSync

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext
    from grpocli.rollout.vllm.options import Vllm

COLDEST = 0.01  # vLLM raises a temperature between 0 and this


class VllmEngine:
    """See `Vllm`; made by `connect`."""

    def __init__(self, client: Client, sync: WeightSync, stop: Sequence[int], version: int | None) -> None:
        """version: of the server's weights; None where another run may have changed them."""
        self.client, self._sync, self._stop, self.version = client, sync, list(stop), version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """`n` completions for each request, in order; raises EngineError if any cannot be had in time."""
        if self.version is None:
            raise EngineError("a given vLLM server may have any weights: sync before the first completion")
        if 0 < sampling.temperature < COLDEST:
            raise ConfigError.of(
                "rollout.temperature", sampling.temperature, f"vLLM samples at {COLDEST} at least (or at 0)"
            )
        answers = self.client.complete([body(request, sampling, self._stop) for request in requests])
        return [
            completions(choices, request, sampling, self.version)
            for choices, request in zip(answers, requests, strict=True)
        ]

    def sync(self, version: int) -> dict[str, float]:
        metrics = self._sync(version)
        self.version = version
        return metrics

    def close(self) -> None:
        self.client.close()


def connect(options: Vllm, context: EngineContext) -> VllmEngine:
    """Talk to the server whose address `launch` left in the run folder."""
    endpoint = Endpoint.load(run_file(context.job.run_dir))
    client = Client(endpoint, options.request_timeout)
    sync = WeightSync(client, context, context.sync.tolerance)
    initial = 0 if options.base_url is None else None
    return VllmEngine(client, sync, stop_ids(context.policy.model, context.tokenizer), initial)
