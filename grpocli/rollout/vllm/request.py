"""Requests in vLLM's form, and completions from its answers: token ids in, token ids out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpocli.errors import ConfigError, EngineError
from grpocli.types import Completion, Request, Sampling

ROUNDING = 1e-3
"""The largest log-prob above 0 that counts as rounding."""
COLDEST, HOTTEST = 0.01, 2.0
"""vLLM raises a temperature between 0 and COLDEST, and refuses one above HOTTEST."""
REASON = 300  # characters of vLLM's reason, which may hold its parser's whole state


def check_temperature(sampling: Sampling) -> None:
    """Raise ConfigError if vLLM would change or refuse the temperature."""
    if sampling.temperature != 0 and not COLDEST <= sampling.temperature <= HOTTEST:
        problem = f"vLLM samples at {COLDEST} at least (or at 0), and at {HOTTEST:g} at most"
        raise ConfigError(problem, key="rollout.temperature", value=sampling.temperature)


def check_sampling(sampling: Sampling, ask: Callable[[Request, Sampling], Any]) -> None:
    """Sample one token to see whether vLLM accepts the regex or JSON schema, which only its grammar can tell.

    ask: sends a request, and raises EngineError if vLLM refuses it. Raises ConfigError that names the key.
    """
    name = sampling.structure
    if not name:
        return
    try:
        ask(Request([0], 1, seed=0), replace(sampling, max_tokens=1))
    except EngineError as error:
        reason = " ".join(str(error).split())[:REASON]
        raise ConfigError(
            f"vLLM cannot use it: {reason}", key=f"rollout.{name}", value=getattr(sampling, name)
        ) from error


def body(request: Request, sampling: Sampling, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The JSON of a request. A whole group is one request, so that vLLM computes the prompt once."""
    return {"token_ids": list(request.token_ids), "sampling_params": sampling_params(request, sampling, stop_token_ids)}


def sampling_params(request: Request, sampling: Sampling, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams as JSON.

    To call `SamplingParams(**...)` itself, convert `structured_outputs` to a StructuredOutputsParams.
    """
    sampling = request.under(sampling)
    return {
        "n": 1 if sampling.temperature == 0 else request.n,  # greedy completions are all equal
        "seed": spread_seed(request.seed),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_token_ids),
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(sampling.stop),  # vLLM finds stop strings in the text, but cuts no token
        "include_stop_str_in_output": bool(sampling.stop),
        **_structure(sampling),
    }


def _structure(sampling: Sampling) -> dict[str, Any]:
    if sampling.regex is not None:
        return {"structured_outputs": {"regex": sampling.regex}}
    if sampling.json_schema is not None:
        return {"structured_outputs": {"json": sampling.json_schema}}
    return {}


def completions(
    choices: Sequence[dict[str, Any]],
    request: Request,
    sampling: Sampling,
    version: int,
    *,
    synced: bool = False,
    vocabulary: int | None = None,
) -> list[Completion]:
    """The `n` completions of a request from vLLM's choices, in order. Raises EngineError for a broken answer.

    version: of tokens without a label. synced: whether every server was synced before the request, so that any label
    must be a version of this run. vocabulary: the model's number of tokens; None: do not check token ids.
    """
    sampling = request.under(sampling)
    greedy = sampling.temperature == 0
    if synced:
        _check_versions(choices)
    for choice in choices:
        if problem := _problem(choice, sampling.max_tokens, vocabulary):
            raise EngineError(f"{choice.get('server', 'vLLM')} returned a broken completion: {problem}")
    made = [_completion(choice, greedy, version) for choice in choices]
    server = choices[0].get("server", "vLLM") if choices else "vLLM"
    for one in made:
        if one.truncated and len(one.token_ids) < sampling.max_tokens:
            raise EngineError(
                f"{server} stopped after {len(one.token_ids)} of {sampling.max_tokens} tokens, because its context "
                "holds no more with the prompt: raise engine.max_model_len"
            )
    if greedy:
        made *= request.n
    if len(made) != request.n:
        raise EngineError(f"{server} returned {len(made)} completions of a prompt instead of {request.n}")
    return made


def _completion(choice: dict[str, Any], greedy: bool, version: int) -> Completion:
    ids, reason = choice["token_ids"], choice["finish_reason"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    spans = _spans(choice.get("weight_versions") or [], version)
    return Completion(
        ids,
        [0.0] * len(ids) if greedy else logprobs,
        reason,
        version=min((v for v, _ in spans), default=version),
        spans=spans if len(spans) > 1 else None,
    )


def _problem(choice: dict[str, Any], max_tokens: int, vocabulary: int | None) -> str:
    """The problem of a choice; "" if there is none."""
    try:
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        ends = [(label["start"], label["end"]) for label in choice.get("weight_versions") or []]
        if reason not in ("stop", "length") or len(ids) != len(logprobs) or not ids:
            return f'{len(ids)} tokens, {len(logprobs)} log-probs, finish reason "{reason}"'
        if len(ids) > max_tokens:
            return f"{len(ids)} tokens instead of at most {max_tokens}"
        for token in ids:
            if type(token) is not int or not 0 <= token < (vocabulary or math.inf):
                return f"{token!r} is not a token of the model, which has {vocabulary}"
        for logprob in logprobs:
            if not -math.inf < logprob <= ROUNDING:
                return f"{logprob!r} is not a log-prob"
        starts = [0, *(end for _, end in ends)]
        if ends and ([start for start, _ in ends] != starts[:-1] or starts != sorted(starts) or starts[-1] != len(ids)):
            return f"its weight versions cover the tokens {ends}, and it has {len(ids)}"
    except (AttributeError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _check_versions(choices: Sequence[dict[str, Any]]) -> None:
    for choice in choices:
        for label in choice.get("weight_versions") or []:
            if not isinstance(label["version"], int):
                raise EngineError(
                    f'vLLM answered with weights of version "{label["version"]}", which this run has not sent: the '
                    "server is new, or another program changes its weights"
                )


def _spans(labels: Sequence[dict[str, Any]], version: int) -> list[tuple[int, int]]:
    """(version, number of tokens) in order. Another run's label, before the first sync, counts as `version`."""
    spans: list[tuple[int, int]] = []
    for label in labels:
        number = label["version"] if isinstance(label["version"], int) else version
        tokens = label["end"] - label["start"]
        if spans and spans[-1][0] == number:
            spans[-1] = (number, spans[-1][1] + tokens)
        elif tokens:
            spans.append((number, tokens))
    return spans


def spread_seed(seed: int) -> int:
    """A seed far from its neighbours' seeds, because vLLM gives the i-th completion of a request seed + i."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())
