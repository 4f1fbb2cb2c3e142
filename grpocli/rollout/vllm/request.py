"""A request in vLLM's own words, and its answer in ours: token ids in, token ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from grpocli.data import Completion, Request, Sampling
from grpocli.errors import EngineError


def body(request: Request, sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """A whole group is one request, so that vLLM computes the prompt once."""
    return {"token_ids": list(request.token_ids), "sampling_params": sampling_params(request, sampling, stop_ids)}


def sampling_params(request: Request, sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """What vLLM's SamplingParams are made of."""
    return {
        "n": 1 if sampling.temperature == 0 else request.n,  # greedy ones are all equal
        "seed": spread(request.seed),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(stop_ids),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def completions(
    choices: Sequence[dict[str, Any]], request: Request, sampling: Sampling, version: int
) -> list[Completion]:
    """The `n` completions of a request from the answer's choices, in order. Raises EngineError for a broken answer."""
    greedy = sampling.temperature == 0
    made = [_completion(choice, greedy, version) for choice in choices]
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


def _completion(choice: dict[str, Any], greedy: bool, version: int) -> Completion:
    ids, reason = choice["token_ids"], choice["finish_reason"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    if reason not in ("stop", "length") or len(ids) != len(logprobs) or not ids:
        raise EngineError(
            f'vLLM returned a broken completion: {len(ids)} tokens, {len(logprobs)} log-probs, finish reason "{reason}"'
        )
    return Completion(ids, [0.0] * len(ids) if greedy else logprobs, reason, version)


def spread(seed: int) -> int:
    """A seed far from its neighbours': of n completions vLLM gives the i-th seed + i, and requests count up too."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())
