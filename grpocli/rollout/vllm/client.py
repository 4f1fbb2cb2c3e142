"""A vLLM server over HTTP: its routes, and completions from token ids to token ids, in vLLM's form.

`ServerClient` repeats a request while the server is busy, and raises ServerGone when the server is gone or makes no
progress; the supervisor then replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import re
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from grpocli.errors import EngineError
from grpocli.http import BUSY, is_loopback, request, retry_delay
from grpocli.processes.threads import run_in_thread
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.text import mask, one_line
from grpocli.types import Completion, Request, Sampling

T = TypeVar("T")
logger = logging.getLogger(__name__)

MODEL = "policy"
"""The name of the served model."""
ADAPTER = f"{MODEL}-v"
"""With LoRA each update is an adapter with this name and its version."""
FIRST = -1  # priority above all waiting requests
UNFINISHED = "unfinished"  # the version label of a mixture of weights
ROUNDING = 1e-3
"""The largest log-prob above 0 that counts as rounding."""

CHECK = 5.0
"""Seconds for one check of a server, and between two checks while an answer is awaited."""
FIRST_DELAY = 0.5
"""Seconds at most before the first retry at a busy server."""
GENERATE = "/inference/v1/generate"  # token ids in, token ids out
REPEATABLE = (GENERATE, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
"""Requests besides GET that may be retried; with fixed seeds completions are the same."""
PAUSED = "Generation is paused"  # with 503, the answer of vLLM 0.33 to a request during a pause; 0.32 holds the request
COUNTED = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class RequestRefused(EngineError):
    """The server answered with an HTTP error."""

    def __init__(self, message: str, answer: httpx.Response | None = None) -> None:
        super().__init__(message)
        self.status = answer.status_code if answer else 0
        self.retry_after = answer if answer and "retry-after" in answer.headers else None


class ServerGone(EngineError):
    """The server cannot be reached, did not answer in time, or its engine died; a new server must take its place."""


class ServerClient:
    """One server's routes, called from several threads. A failed call raises EngineError that names the call.

    The timeout of a call restarts while the server makes progress: it computes tokens for any client, or answers
    another call.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, run: str = "", patience: float = 0.0) -> None:
        """timeout: seconds without progress after which a call fails.

        run: a prefix of version labels, which distinguishes this run's weights from another run's.
        patience: seconds during which a busy server, or one with an internal error, is asked again; 0: not at all.
        """
        self.endpoint, self.timeout, self.run, self.patience = endpoint, timeout, run, patience
        self.where = f"the vLLM server at {endpoint.url}"
        self.model = MODEL
        """The name that completions are requested from, `MODEL` or an adapter."""
        self.prepared = False
        """Whether a sync has prepared this server for the next ones."""
        self.lost: ServerGone | None = None
        """The error by which the server was found gone, stuck or replaced; None while it answers."""
        self.open = True
        """Whether it has the weights to sample with; a replaced one first gets a sync."""
        self._numbered = False  # whether its weights have carried a version of this run
        self._accepted = False  # whether it has accepted our key
        self._answered = 0.0  # the time of the last successful call
        self._last_sign = 0.0  # the time of the last answer to any call, or of the last token computed for any client
        self._tokens = 0.0  # computed until the last check
        self._next_check = 0.0  # the time of the next check while calls wait
        self._warned = -math.inf  # the time of the last log line about a busy server
        https = endpoint.url.startswith("https")
        self._certificates: ssl.SSLContext | bool = httpx.create_ssl_context() if https else False  # slow, so once
        self._running: Counter[str] = Counter()  # requests by model
        self._running_lock = threading.Lock()

    def replaced_by(self, endpoint: Endpoint) -> ServerClient:
        """The client of the server that takes this one's place, which is not open yet."""
        client = ServerClient(endpoint, self.timeout, self.run, self.patience)
        client.open = False
        return client

    @property
    def takes_requests(self) -> bool:
        return self.open and not self.lost

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], T], once: bool = False
    ) -> T:
        """What `read` finds in the answer's JSON. A busy server is asked again.

        Patience restarts whenever the server answers another request, because this one's turn will come.
        once: a part of a sync. A busy server may have executed it, so it counts as lost and gets a sync later.
        """
        began, tries = time.monotonic(), 0
        while True:
            try:
                return self._read(path, await self._once(method, path, body), read)
            except RequestRefused as refused:
                if not self.patience or refused.status not in BUSY:
                    raise
                if once:
                    raise self.gone(str(refused)) from refused
                if method != "GET" and path.partition("?")[0] not in REPEATABLE:
                    raise
                now = time.monotonic()
                left = max(began, self._answered) + self.patience - now
                if left <= 0:
                    raise self.gone(f"{refused}, for {self.patience:g} s (engine.reconnect_timeout)") from refused
                if now > self._warned + self.patience:
                    self._warned = now
                    logger.warning(
                        "%s; repeating the request for %g s (engine.reconnect_timeout)", refused, self.patience
                    )
                tries += 1
                await asyncio.sleep(min(retry_delay(tries, FIRST_DELAY, refused.retry_after), left))
            if self.lost:  # found by another call
                raise ServerGone(str(self.lost))

    def gone(self, problem: str) -> ServerGone:
        """The error to raise when the server is found lost."""
        self.lost = ServerGone(problem)
        return self.lost

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """One attempt, which checks the server while it waits: a dead engine may never answer, a busy one may yet."""
        began = time.monotonic()
        try:
            async with self._http() as http:
                call = asyncio.ensure_future(_after_a_pause(http, method, path, body))
                try:
                    while not (await asyncio.wait({call}, timeout=min(CHECK, self.timeout)))[0]:
                        await self._check(http, path, began)
                finally:
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                response = call.result()
                self._last_sign = time.monotonic()
                if not response.is_success:
                    raise await self._failure(path, body or {}, response)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise self.gone(f"{self.where} is gone ({path}: {reason}){self.endpoint.cause()}") from error
        self._answered, self._accepted = self._last_sign, True
        return response

    def _http(self) -> httpx.AsyncClient:
        """httpx's client: a proxy only for other machines; a timeout only to connect."""
        mask(self.endpoint.api_key, "(the server's key)")
        return httpx.AsyncClient(
            base_url=self.endpoint.url,
            headers={"Authorization": f"Bearer {self.endpoint.api_key}"},
            timeout=httpx.Timeout(None, connect=2 * CHECK),
            trust_env=not is_loopback(urlsplit(self.endpoint.url).hostname or ""),
            verify=self._certificates,
        )

    async def _check(self, http: httpx.AsyncClient, path: str, began: float) -> None:
        """Raise ServerGone if nothing listens any more, the engine is dead, or the call's time is over."""
        if time.monotonic() >= self._next_check:  # one of the waiting calls checks for all
            self._next_check = time.monotonic() + CHECK
            if await _health(http) is False:
                raise self.gone(f"{self.where} died during {path}{self.endpoint.cause()}")
            counts = await _counts(http)
            tokens = counts["prompt_tokens_total"] + counts["generation_tokens_total"]
            if tokens != self._tokens:
                self._last_sign, self._tokens = time.monotonic(), tokens
        if time.monotonic() >= max(began, self._last_sign) + self.timeout:
            problem = f"nor made progress, within {self.timeout:g} s (engine.request_timeout)"
            raise self.gone(f"{self.where} did not answer {path}, {problem}")

    async def _failure(self, path: str, body: dict[str, Any], response: httpx.Response) -> EngineError:
        """The error of a failed response: ServerGone if the engine has died or another server took its place."""
        problem = f"{self.where} refused {path} ({response.status_code}): {_message(response)}"
        refused = RequestRefused(problem, response)
        if response.status_code >= 500:
            async with self._http() as new:  # after an error in a route, vLLM closes the connection that asked
                if await _health(new) is not True:
                    return self.gone(f"{refused}{self.endpoint.cause()}")
        knows_no_adapter = response.status_code == 404 and body.get("model", MODEL) != MODEL
        replaced = knows_no_adapter or (response.status_code == 401 and self._accepted)
        return self.gone(str(refused)) if replaced else refused

    def _read(self, path: str, response: httpx.Response, read: Callable[[Any], T]) -> T:
        """Raises EngineError for an answer of an unexpected form, for example a proxy's."""
        try:
            return read(response.json() if "json" in response.headers.get("content-type", "") else None)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"the answer to {path} at {self.endpoint.url} is not from a vLLM server, or invalid"
            raise EngineError(f"{problem}: {type(error).__name__}: {error}") from error

    def get(self, path: str, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """The answer's JSON, or what `read` finds in it."""
        return asyncio.run(self.request("GET", path, None, read))

    def post(
        self, path: str, body: Any = None, read: Callable[[Any], Any] = lambda answer: answer, once: bool = False
    ) -> Any:
        """The answer's JSON, or what `read` finds in it. once: see `request`."""
        return asyncio.run(self.request("POST", path, body, read, once))

    def counts(self) -> defaultdict[str, float]:
        """The server's own counts for all clients, by the names of vLLM's metrics; 0 if unknown."""

        async def read() -> defaultdict[str, float]:
            async with self._http() as http:
                return await _counts(http)

        return defaultdict(float) if self.lost else asyncio.run(read())

    # Completions

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of one request, in order."""
        model = self.model
        with self._running_lock:
            self._running[model] += 1
        try:
            return await self.request(
                "POST", GENERATE, {"model": model, **body}, functools.partial(self._choices, model)
            )
        finally:
            with self._running_lock:
                self._running -= Counter([model])  # which drops a count of 0

    def _choices(self, model: str, answer: Any) -> list[dict[str, Any]]:
        """The choices of an answer, in order, with versions as numbers."""
        choices: list[dict[str, Any]] = answer["choices"]
        for choice in choices:
            choice["server"] = self.where
            if choice.get("finish_reason") == "abort":
                raise self.gone(f"{self.where} is shutting down (it aborted requests)")
            for label in choice.get("weight_versions") or []:
                label["version"] = self._version(str(label["version"]))
            if model != MODEL:  # a request keeps its adapter to its end
                version = int(model.removeprefix(ADAPTER).partition(".")[0])
                choice["weight_versions"] = [{"version": version, "start": 0, "end": len(choice["token_ids"])}]
        numbers = sorted(int(choice["index"]) for choice in choices)
        if numbers != list(range(len(choices))):
            raise ValueError(f"its completions are numbered {numbers}")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def score(self, token_ids: Sequence[int], first: bool = False, model: str = "") -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1.

        first: before waiting requests. model: by default the one that completions are requested from.
        """

        def read(answer: Any) -> list[float]:
            entries = answer["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids[1:], strict=True)]

        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body = {"model": model or self.model, "token_ids": list(token_ids), "sampling_params": sampling}
        found: list[float] = self.post(GENERATE, body | ({"priority": FIRST} if first else {}), read)
        return found

    def sample(self, token_ids: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Sample `tokens` more with a fixed seed, before waiting requests; their ids and log-probs at temperature 1."""

        def read(answer: Any) -> tuple[list[int], list[float]]:
            (choice,) = answer["choices"]
            return choice["token_ids"], [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]

        sampling = {"max_tokens": tokens, "temperature": 1, "seed": 0, "logprobs": 0, "ignore_eos": True}
        body = {"model": self.model, "token_ids": list(token_ids), "sampling_params": sampling, "priority": FIRST}
        found: tuple[list[int], list[float]] = self.post(GENERATE, body, read)
        return found

    # Weights

    def world_size(self) -> int:
        """The number of the server's processes that hold weights."""
        return int(self.get("/get_world_size", lambda answer: int(answer["world_size"])))

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Prepare the server's side of the weight transfer with its backend's settings."""
        self.post("/init_weight_transfer_engine", {"init_info": info}, once=True)
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
        except RequestRefused:
            self.abandon_update()
            self.post("/start_weight_update", {}, once=True)

    def update(self, info: dict[str, Any]) -> None:
        """Have the server load some of the weights; `info` is what its backend needs to find them."""
        self.post("/update_weights", {"update_info": info}, once=True)

    def finish_update(self, version: int) -> None:
        """End the update and label the server's weights with `version`."""
        self.post("/finish_weight_update", {"weight_version": f"{self.run}.{version}"}, once=True)

    def abandon_update(self) -> None:
        """End an unfinished update, if any, and label the weights as a mixture."""
        try:
            self.post("/finish_weight_update", {})
        except RequestRefused:  # no update is unfinished
            return
        self.post("/update_weight_version", {"new_version": UNFINISHED})

    def reset_prefix_cache(self, running: bool = False) -> None:
        """Drop keys and values of the old weights; running: also those of frozen requests. Raises EngineError."""
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        if not self.post(path, read=lambda answer: answer["success"]):
            raise EngineError(f"{self.where} did not clear its prefix cache because requests are running")

    def weight_version(self) -> int | str:
        """The version of this run's weights, or the label of other weights."""
        label = self.get("/weight_info", lambda answer: str(answer["weight_version"]))
        return self._version(label)

    def set_version(self, version: int) -> None:
        """Label the server with a version without a weight update, after an adapter was loaded."""
        self.post("/update_weight_version", {"new_version": f"{self.run}.{version}"})

    def _version(self, label: str) -> int | str:
        """The version of this run's weights, or the label of other weights.

        Raises EngineError for other weights after the server received this run's.
        """
        run, dot, number = label.rpartition(".")
        if dot and run == self.run and number.isdecimal():
            self._numbered = True
            return int(number)
        if self._numbered and label != UNFINISHED:
            if dot:
                raise EngineError(
                    f"another run has changed the weights of {self.where}: a server is for one run at a time"
                )
            raise self.gone(f"{self.where} was started again")
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
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, once=True)

    def unload_adapter(self, name: str) -> None:
        self.post("/v1/unload_lora_adapter", {"lora_name": name}, once=True)


async def _after_a_pause(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> httpx.Response:
    """The answer, for which the request waits until the server is not paused, as if the server had held it."""
    while True:
        response = await http.request(method, path, json=body)
        if response.status_code != 503 or PAUSED not in response.text:
            return response
        await asyncio.sleep(FIRST_DELAY / 2)


async def _health(http: httpx.AsyncClient) -> bool | None:
    """Whether the server runs and its engine lives; None if unknown, since the server may be busy."""
    try:
        answer = await request(http, "GET", "/health", CHECK)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return None
    return True if answer.is_success else False if answer.status_code == 503 else None


async def _counts(http: httpx.AsyncClient) -> defaultdict[str, float]:
    """The server's own counts for all clients, by the names of vLLM's metrics; 0 if unknown."""
    counts: defaultdict[str, float] = defaultdict(float)
    with contextlib.suppress(httpx.HTTPError):  # the waiting call and `_health` report errors
        for name, value in COUNTED.findall((await request(http, "GET", "/metrics", CHECK)).text):
            counts[name] += float(value)
    return counts


def _message(response: httpx.Response) -> str:
    """The message in one of vLLM's two error formats, else the answer's text."""
    error: Any = response.text
    with contextlib.suppress(ValueError):  # not JSON, but a proxy's page
        error = response.json()
    for name in ("error", "message"):
        error = error.get(name, error) if isinstance(error, dict) else error
    return one_line(str(error))[:500].removesuffix(".")


def call_all(servers: Sequence[ServerClient], call: Callable[[ServerClient], T]) -> list[T]:
    """Call all servers concurrently and wait for all; then raise the first server's error, if any."""
    futures = [run_in_thread(functools.partial(call, server), "call to a server") for server in servers]
    wait(futures)
    return [future.result() for future in futures]


# Requests and completions


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
    newest: int | None = None,
    vocabulary: float = math.inf,
) -> list[Completion]:
    """The `n` completions of a request from vLLM's choices, in order. Raises EngineError for a broken answer.

    version: of tokens without a label. newest: given if every server was synced to `version` before the request, so
    that labels must be between both. vocabulary: the number of the policy's token ids.
    """
    sampling = request.under(sampling)
    made = [_completion(choice, sampling, version, newest, vocabulary) for choice in choices]
    if sampling.temperature == 0:
        made *= request.n
    if len(made) != request.n:
        server = choices[0].get("server", "vLLM") if choices else "vLLM"
        raise EngineError(f"{server} returned {len(made)} completions of a prompt instead of {request.n}")
    return made


def _completion(
    choice: dict[str, Any], sampling: Sampling, version: int, newest: int | None, vocabulary: float
) -> Completion:
    server = choice.get("server", "vLLM")
    try:
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        labels = choice.get("weight_versions") or []
        labelled = _labelled(labels)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{server} returned a broken completion: {type(error).__name__}: {error}") from error
    wrong = [repr(one) for one in ids if type(one) is not int or not 0 <= one < vocabulary]
    wrong += [repr(one) for one in logprobs if not -math.inf < one <= ROUNDING]
    fits = 0 < len(ids) == len(logprobs) <= sampling.max_tokens and labelled in (0, len(ids))
    if wrong or not fits or reason not in ("stop", "length"):
        counts = f'{len(ids)} tokens, {len(logprobs)} log-probs, versions of {labelled}, finish reason "{reason}"'
        raise EngineError(f"{server} returned a broken completion: {', '.join([counts, *wrong[:1]])}")
    for found in (one["version"] for one in labels):
        if newest is not None and not (isinstance(found, int) and version <= found <= newest):
            raise EngineError(
                f'{server} answered with weights of version "{found}", which this run has not sent since the request: '
                "the server is new, or another program changes its weights"
            )
    spans = _spans(labels, version)
    made = Completion(
        ids,
        [0.0] * len(ids) if sampling.temperature == 0 else logprobs,
        reason,
        version=min((v for v, _ in spans), default=version),
        spans=spans if len(spans) > 1 else None,
    )
    if made.truncated and len(ids) < sampling.max_tokens:
        raise EngineError(
            f"{server} stopped after {len(ids)} of {sampling.max_tokens} tokens, because its context holds no more "
            "with the prompt: raise engine.max_model_len"
        )
    return made


def _labelled(labels: Sequence[dict[str, Any]]) -> int:
    """The number of tokens, from the first on, that have a version; -1 if spans overlap or leave a gap."""
    labelled = 0
    for start, end in ((label["start"], label["end"]) for label in labels):
        if not type(start) is type(end) is int or not start == labelled <= end:
            return -1
        labelled = end
    return labelled


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
