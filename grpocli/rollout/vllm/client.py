"""A vLLM server's routes: completions from token ids to token ids, the probe, weight transfers and adapters.

Requests and answers have vLLM's form; the in-process engine (`colocate.py`) has the same.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm.connection import GENERATE, Connection, Refused, ServerGone
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.types import Completion, Request, Sampling

T = TypeVar("T")

MODEL = "policy"
"""The name of the served model."""
ADAPTER = f"{MODEL}-v"
"""With LoRA each update is an adapter with this name and its version."""
FIRST = -1  # priority above all waiting requests
UNFINISHED = "unfinished"  # the version label of a mixture of weights
CANARY = "canary"  # in place of a version: weights that are sent as a test only (`weight_verifier.py`)
ROUNDING = 1e-3
"""The largest log-prob above 0 that counts as rounding."""
COLDEST, HOTTEST = 0.01, 2.0
"""vLLM raises a temperature between 0 and COLDEST, and refuses one above HOTTEST."""
REASON = 300  # characters of vLLM's reason, which may hold its parser's whole state


def _whole(answer: Any) -> Any:
    return answer


class ServerClient:
    """One server's routes. A failed call raises EngineError that names the call.

    timeout: seconds without any sign of progress after which a call fails, see `connection.py`.
    patience: seconds during which a busy server, or one with an internal error, is retried; 0: no retries.
    run: a prefix of version labels, which distinguishes this run's weights from another run's.
    model: the name that completions are requested from, `MODEL` or an adapter.
    prepared: whether `init_transfer` has prepared this server; False again after `connect`.
    proven: whether this server has followed a canary, or filled its caches under random weights; False again after
        `connect`.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, run: str = "", patience: float = 0.0) -> None:
        self.timeout, self.run, self.patience = timeout, run, patience
        self.connect(endpoint)

    def connect(self, endpoint: Endpoint) -> None:
        """Use the server at `endpoint` from now on."""
        self.connection = Connection(endpoint, self.timeout, self.patience)
        self.model, self.prepared, self.proven = MODEL, False, False
        self._running: Counter[str] = Counter()  # running requests by model
        self._running_lock = threading.Lock()

    @property
    def endpoint(self) -> Endpoint:
        return self.connection.endpoint

    @property
    def lost(self) -> ServerGone | None:
        """The error by which the server was found gone, stuck or replaced; None while it answers."""
        return self.connection.lost

    def get(self, path: str, read: Callable[[Any], Any] = _whole) -> Any:
        """The answer's JSON, or what `read` finds in it."""
        return asyncio.run(self.connection.request("GET", path, None, read))

    def post(self, path: str, body: dict[str, Any] | None = None, read: Callable[[Any], Any] = _whole) -> Any:
        """The answer's JSON, or what `read` finds in it."""
        return asyncio.run(self.connection.request("POST", path, body, read))

    def _post_once(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Post a part of a sync. A busy server may have executed it, so it counts as lost and gets a sync later."""
        try:
            self.post(path, body)
        except Refused as refused:
            if not self.connection.busy(refused):
                raise
            raise self.connection.gone(str(refused)) from refused

    # Completions

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of one request, in order."""
        connection, model = self.connection, self.model
        lock, running = self._running_lock, self._running  # of this server, since `connect` replaces them
        with lock:
            running[model] += 1
        try:
            read = functools.partial(self._choices, connection, model)
            return await self._ask_model(connection, model, body, read)
        finally:
            with lock:
                running[model] -= 1
                if not running[model]:
                    del running[model]

    async def _ask_model(self, connection: Connection, model: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """What `read` finds in the answer. A server that does not know an adapter is another one: ServerGone."""
        try:
            return await connection.request("POST", GENERATE, {"model": model, **body}, read)
        except Refused as refused:
            if refused.status == 404 and model != MODEL:
                raise connection.gone(str(refused)) from refused
            raise

    def _choices(self, connection: Connection, model: str, answer: Any) -> list[dict[str, Any]]:
        """The choices of an answer, in order, with versions as numbers."""
        choices: list[dict[str, Any]] = answer["choices"]
        for choice in choices:
            choice["server"] = connection.where
            if choice.get("finish_reason") == "abort":
                raise connection.gone(f"{connection.where} is shutting down (it aborted requests)")
            for label in choice.get("weight_versions") or []:
                label["version"] = self._version(connection, str(label["version"]))
                if label["version"] == CANARY:
                    raise EngineError(f"{connection.where} sampled with a canary's weights before its sync ended")
            if model != MODEL:  # a request keeps its adapter to its end
                version = int(model.removeprefix(ADAPTER).partition(".")[0])
                choice["weight_versions"] = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
        numbers = sorted(int(choice["index"]) for choice in choices)
        if numbers != list(range(len(choices))):
            raise ValueError(f"its completions are numbered {numbers}")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def score(self, token_ids: Sequence[int], first: bool = False) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1; first: before waiting requests."""

        def read(answer: Any) -> list[float]:
            entries = answer["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids[1:], strict=True)]

        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, **({"priority": FIRST} if first else {})}
        return asyncio.run(self._ask_model(self.connection, self.model, body, read))

    def sample(self, token_ids: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Sample `tokens` more with a fixed seed, before waiting requests; their ids and log-probs at temperature 1."""

        def read(answer: Any) -> tuple[list[int], list[float]]:
            (choice,) = answer["choices"]
            return choice["token_ids"], [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]

        sampling = {"max_tokens": tokens, "temperature": 1, "seed": 0, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "priority": FIRST}
        return asyncio.run(self._ask_model(self.connection, self.model, body, read))

    # Weights

    def world_size(self) -> int:
        """The number of the server's processes that hold weights."""
        return int(self.get("/get_world_size", lambda answer: int(answer["world_size"])))

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Prepare the server's side of the weight transfer with its backend's settings."""
        self._post_once("/init_weight_transfer_engine", {"init_info": info})
        self.prepared = True

    def pause(self, mode: str = "wait") -> None:
        """Hold new requests; "wait": running ones finish first, "keep": they are frozen until `resume`."""
        # `reset_prefix_cache` follows new weights: twice would walk twice over all blocks, millions with a small model
        self.post(f"/pause?mode={mode}&clear_cache=false")

    def resume(self) -> None:
        self.post("/resume")

    def start_update(self) -> None:
        """Begin an update, after closing an unfinished one of another trainer."""
        try:
            self.post("/start_weight_update")
        except Refused:
            self.abandon_update()
            self._post_once("/start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        """Have the server load some of the weights; `info` is what its backend needs to find them."""
        self._post_once("/update_weights", {"update_info": info})

    def finish_update(self, version: int | str) -> None:
        """End the update and label the server's weights with `version`."""
        self._post_once("/finish_weight_update", {"weight_version": f"{self.run}.{version}"})

    def abandon_update(self) -> None:
        """End an unfinished update, if any, and label the weights as a mixture."""
        try:
            self.post("/finish_weight_update", {})
        except Refused:  # no update is unfinished
            return
        self.post("/update_weight_version", {"new_version": UNFINISHED})

    def reset_prefix_cache(self, running: bool = False) -> None:
        """Drop keys and values of the old weights; running: also those of frozen requests. Raises EngineError."""
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        if not self.post(path, read=lambda answer: answer["success"]):
            raise EngineError(f"{self.connection.where} did not clear its prefix cache because requests are running")

    def weight_version(self) -> int | str:
        """The version of this run's weights, or the label of other weights."""
        label = self.get("/weight_info", lambda answer: str(answer["weight_version"]))
        return self._version(self.connection, label)

    def set_version(self, version: int) -> None:
        """Label the server with a version without a weight update, after an adapter was loaded."""
        self.post("/update_weight_version", {"new_version": f"{self.run}.{version}"})

    def _version(self, connection: Connection, label: str) -> int | str:
        """The version of this run's weights, or the label of other weights.

        Raises EngineError for other weights after the server received this run's.
        """
        run, dot, number = label.rpartition(".")
        if dot and run == self.run and number.isdecimal():
            connection.numbered = True
            return int(number)
        if dot and run == self.run and number == CANARY:
            return CANARY
        if connection.numbered and label != UNFINISHED:
            if dot:
                problem = (
                    f"another run has changed the weights of {connection.where}: a server is for one run at a time"
                )
                raise EngineError(problem)
            raise connection.gone(f"{connection.where} was started again")
        return label

    # Adapters

    def adapters(self) -> dict[str, Path]:
        """The folder of each loaded adapter, by name."""

        def read(answer: Any) -> dict[str, Path]:
            return {card["id"]: Path(card["root"]) for card in answer["data"] if card.get("parent")}

        return dict(self.get("/v1/models", read))

    def adapters_in_use(self) -> set[str]:
        """Adapters that running requests of this process use."""
        with self._running_lock:
            return set(self._running) - {MODEL}

    def load_adapter(self, name: str, folder: Path) -> None:
        self._post_once("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        self._post_once("/v1/unload_lora_adapter", {"lora_name": name})


def call_all(servers: Sequence[ServerClient], call: Callable[[ServerClient], T]) -> list[T]:
    """Call all servers concurrently and wait for all; then raise the first server's error, if any."""
    if len(servers) == 1:
        return [call(servers[0])]
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(call, server) for server in servers]
    return [future.result() for future in futures]


# Requests and completions


def check_temperature(sampling: Sampling) -> None:
    """Raise ConfigError if vLLM would change or refuse the temperature."""
    if sampling.temperature != 0 and not COLDEST <= sampling.temperature <= HOTTEST:
        problem = f"vLLM samples at {COLDEST} at least (or at 0), and at {HOTTEST:g} at most"
        raise ConfigError(problem, key="rollout.temperature", value=sampling.temperature)


def check_refusal(error: EngineError, sampling: Sampling) -> None:
    """Raise ConfigError if vLLM refused a request with a regex or JSON schema, which only its grammar can judge."""
    refused = error.status == 400 if isinstance(error, Refused) else isinstance(error.__cause__, ValueError)
    if (name := sampling.structure) and refused:
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
    asked = {"regex": sampling.regex, "json": sampling.json_schema}
    structure = {kind: value for kind, value in asked.items() if value is not None}
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
        **({"structured_outputs": structure} if structure else {}),
    }


def completions(
    choices: Sequence[dict[str, Any]],
    request: Request,
    sampling: Sampling,
    version: int,
    *,
    synced: bool = False,
) -> list[Completion]:
    """The `n` completions of a request from vLLM's choices, in order. Raises EngineError for a broken answer.

    version: of tokens without a label. synced: whether every server was synced before the request, so that any label
    must be a version of this run.
    """
    sampling = request.under(sampling)
    greedy = sampling.temperature == 0
    if synced:
        _check_versions(choices)
    for choice in choices:
        if problem := _problem(choice):
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


def _problem(choice: dict[str, Any]) -> str:
    """The problem of a choice; "" if there is none."""
    try:
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        if reason not in ("stop", "length") or len(ids) != len(logprobs) or not ids:
            return f'{len(ids)} tokens, {len(logprobs)} log-probs, finish reason "{reason}"'
        return next((f"{one!r} is not a log-prob" for one in logprobs if not -math.inf < one <= ROUNDING), "")
    except (KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


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
