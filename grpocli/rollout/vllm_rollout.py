"""engine=vllm in a trainer process: completions from the server, weights to it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpocli.data import Completion, Request, Sampling
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.transformers_engine import stop_ids
from grpocli.rollout.vllm_client import Client
from grpocli.rollout.vllm_endpoint import Endpoint, run_file
from grpocli.rollout.vllm_sync import WeightSync

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext
    from grpocli.rollout.vllm_engine import Vllm

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
        answers = self.client.complete([self._body(request, sampling) for request in requests])
        return [
            self._completions(choices, request, sampling) for choices, request in zip(answers, requests, strict=True)
        ]

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        return {
            "prompt": list(request.token_ids),
            "n": 1 if sampling.temperature == 0 else request.n,  # greedy ones are all equal
            "seed": spread(request.seed),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": self._stop,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }

    def _completions(self, choices: list[dict[str, Any]], request: Request, sampling: Sampling) -> list[Completion]:
        greedy = sampling.temperature == 0
        made = [self._completion(choice, greedy, self.version or 0) for choice in choices]
        for one in made:
            if one.truncated and len(one.token_ids) < sampling.max_tokens:
                raise EngineError(
                    f"vLLM stopped after {len(one.token_ids)} of {sampling.max_tokens} tokens, because with the prompt "
                    "that is all its context holds: raise engine.max_model_len"
                )
        if greedy:
            made *= request.n
        if len(made) != request.n:
            raise EngineError(f"vLLM returned {len(made)} completions of a prompt instead of {request.n}")
        return made

    def _completion(self, choice: dict[str, Any], greedy: bool, version: int) -> Completion:
        ids, logprobs, reason = (
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            choice["finish_reason"],
        )
        if reason not in ("stop", "length") or len(ids) != len(logprobs) or not ids:
            raise EngineError(
                f"vLLM returned a broken completion: {len(ids)} tokens, {len(logprobs)} log-probs, "
                f'finish reason "{reason}"'
            )
        return Completion(ids, [0.0] * len(ids) if greedy else logprobs, reason, version)

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
    sync = WeightSync(client, context, options.sync_tolerance)
    initial = 0 if options.base_url is None else None
    return VllmEngine(client, sync, stop_ids(context.policy.model, context.tokenizer), initial)


def spread(seed: int) -> int:
    """A seed far from its neighbours': of n completions vLLM gives the i-th seed + i, and requests count up too."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())
