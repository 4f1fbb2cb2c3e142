"""A vLLM server over HTTP: its routes, and completions from token ids to token ids.

`Connection` repeats a request while the server is busy, and raises ServerGone when the server is gone or makes no
progress; the supervisor then replaces it. Requests and answers have vLLM's form; the in-process engine (`colocate.py`)
has the same.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from grpocli.errors import ConfigError, EngineError
from grpocli.http import BUSY, is_loopback, request, retry_delay
from grpocli.processes.threads import run_in_thread
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.text import mask
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
COLDEST, HOTTEST = 0.01, 2.0
"""vLLM raises a temperature between 0 and COLDEST, and refuses one above HOTTEST."""
REASON = 300  # characters of vLLM's reason, which may hold its parser's whole state

CHECK = 5.0
"""Seconds for one check of a server, and between two checks while an answer is awaited."""
LONGEST = 10
"""Timeouts after which a call fails, even if the server makes progress."""
FIRST_DELAY = 0.5
"""Seconds at most before the first retry at a busy server; twice as long as between tries during a pause."""
GENERATE = "/inference/v1/generate"  # token ids in, token ids out
REPEATABLE = (GENERATE, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
"""Requests besides GET that may be retried; with fixed seeds completions are the same."""
PAUSED = "Generation is paused"  # with 503, the answer of vLLM 0.33 to a request during a pause; 0.32 holds the request
PAUSED_BY = "by another run or by one that was killed in a sync; give each run its own server, or start this one again"
TOKENS = re.compile(r"^vllm:(prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Refused(EngineError):
    """The server answered with an HTTP error."""

    def __init__(self, message: str, answer: httpx.Response | None = None) -> None:
        super().__init__(message)
        self.status = answer.status_code if answer else 0
        self.retry_after = answer if answer and "retry-after" in answer.headers else None


class ServerGone(EngineError):
    """The server cannot be reached, did not answer in time, or its engine died; a new server must take its place."""

    def __init__(self, message: str, refuses: bool = False) -> None:
        super().__init__(message)
        self.refuses = refuses
        """The server answers, but has been busy or failing for longer than `engine.patience`."""


class Connection:
    """Calls to the server at one address, from several threads.

    The timeout of a call resets while the server makes progress: it computes tokens for any client, answers another
    call, or is paused for a sync.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, patience: float) -> None:
        self.endpoint, self.timeout, self.patience = endpoint, timeout, patience
        self.where = f"the vLLM server at {endpoint.url}"
        self.lost: ServerGone | None = None
        """The error by which the server was found gone, stuck or replaced; None while it answers."""
        self.numbered = False
        """Whether the server's weights have carried a version of this run."""
        self._last_sign = 0.0  # the time of the last answer to any call, or of the last token computed for any client
        self._served = 0.0  # the time of the last successful call
        self._accepted = False  # whether the server has accepted our key
        self._paused = False  # whether the server held requests at the last check
        self._tokens: float | None = None  # computed until the last check
        self._next_check = 0.0  # the time of the next check while calls wait
        self._warned = -math.inf  # the time of the last log line about a busy server

    async def request(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """What `read` finds in the answer's JSON, with retries while the server is busy.

        Patience restarts whenever the server answers another request, because this one's turn will come.
        """
        began, tries = 0.0, 0
        while True:
            try:
                response = await self._once(method, path, body)
            except Refused as refused:
                if not self.busy(refused) or (method != "GET" and path.partition("?")[0] not in REPEATABLE):
                    raise
                now, tries = time.monotonic(), tries + 1
                began = max(began or now, self._served)
                left = began + self.patience - now
                if left <= 0:
                    problem = f"{refused}, for {self.patience:g} s (engine.patience)"
                    raise self.gone(problem, refuses=True) from refused
                if now > self._warned + self.patience:
                    self._warned = now
                    logger.warning("%s; repeating the request for %g s (engine.patience)", refused, self.patience)
                await asyncio.sleep(min(retry_delay(tries, FIRST_DELAY, refused.retry_after), left))
            else:
                return self._read(path, response, read)
            if self.lost:  # found by another call
                raise ServerGone(str(self.lost))

    def busy(self, refused: Refused) -> bool:
        """Whether a retry may succeed."""
        return self.patience > 0 and refused.status in BUSY

    def gone(self, problem: str, refuses: bool = False) -> ServerGone:
        """The error to raise when the server is found lost."""
        self.lost = ServerGone(problem, refuses)
        return self.lost

    async def generated(self) -> float:
        """Tokens that the server has generated since its start, for all clients; 0 if unknown."""
        async with self._http() as http:
            return (await _tokens_computed(http)).get("generation", 0.0)

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """One attempt, which checks the server while it waits: a dead engine may never answer, a busy one may yet."""
        began = time.monotonic()
        try:
            async with self._http() as http:
                call = asyncio.ensure_future(_after_a_pause(http, method, path, body))
                try:
                    while not (await asyncio.wait({call}, timeout=min(CHECK, self._left(began))))[0]:
                        await self._check(http, path, began)
                finally:
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                response = call.result()
                self._last_sign = time.monotonic()
                if not response.is_success:
                    raise await self._failure(path, response)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise self.gone(f"{self.where} is gone ({path}: {reason}){self.endpoint.cause()}") from error
        self._served, self._accepted = self._last_sign, True
        return response

    def _http(self) -> httpx.AsyncClient:
        """httpx's client: a proxy only for other machines; a timeout only to connect."""
        mask(self.endpoint.api_key, "(the server's key)")
        return httpx.AsyncClient(
            base_url=self.endpoint.url,
            headers={"Authorization": f"Bearer {self.endpoint.api_key}"},
            timeout=httpx.Timeout(None, connect=2 * CHECK),
            trust_env=not is_loopback(urlsplit(self.endpoint.url).hostname or ""),
            verify=_certificates() if self.endpoint.url.startswith("https") else False,
        )

    def _left(self, began: float) -> float:
        """Seconds left to a call if no further sign of progress comes; 0 when its time is over."""
        without_sign = max(began, self._last_sign) + self.timeout
        return max(0.0, min(without_sign, began + LONGEST * self.timeout) - time.monotonic())

    async def _check(self, http: httpx.AsyncClient, path: str, began: float) -> None:
        """Raise ServerGone if nothing listens any more, the engine is dead, or the call's time is over.

        One of the waiting calls checks for all. A pause is a sign of progress for completions, which wait for a sync.
        """
        if time.monotonic() < self._next_check and self._left(began):
            return
        self._next_check = time.monotonic() + CHECK
        if await _health(http) is False:
            raise self.gone(f"{self.where} died during {path}{self.endpoint.cause()}")
        counts = await _tokens_computed(http)
        tokens = sum(counts.values()) if counts else None
        self._paused = path == GENERATE and await _is_paused(http)
        if self._paused or (tokens is not None and self._tokens is not None and tokens != self._tokens):
            self._last_sign = time.monotonic()
        self._tokens = tokens
        if self._left(began):
            return
        problem = f"nor made progress, within {self.timeout:g} s (engine.request_timeout)"
        if time.monotonic() >= began + LONGEST * self.timeout:
            paused = f": it is paused, {PAUSED_BY}" if self._paused else ""
            problem = f"within {LONGEST} times engine.request_timeout={self.timeout:g} s{paused}"
        raise self.gone(f"{self.where} did not answer {path}, {problem}")

    async def _failure(self, path: str, response: httpx.Response) -> EngineError:
        """The error of a failed response: ServerGone if the engine has died or another server took its place."""
        refused = Refused(f"{self.where} refused {path} ({response.status_code}): {_message(response)}", response)
        if response.status_code >= 500:
            async with self._http() as new:  # after an error in a route, vLLM closes the connection that asked
                if await _health(new) is not True:
                    return self.gone(f"{refused}{self.endpoint.cause()}")
        replaced = response.status_code == 401 and self._accepted
        return self.gone(str(refused)) if replaced else refused

    def _read(self, path: str, response: httpx.Response, read: Callable[[Any], T]) -> T:
        """Raises EngineError for an answer of an unexpected form, for example a proxy's."""
        try:
            return read(response.json() if "json" in response.headers.get("content-type", "") else None)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"the answer to {path} at {self.endpoint.url} is not from a vLLM server, or invalid"
            raise EngineError(f"{problem}: {type(error).__name__}: {error}") from error


async def _after_a_pause(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> httpx.Response:
    """The answer, for which the request waits until the server is not paused, as if the server had held it."""
    while True:
        response = await http.request(method, path, json=body)
        if response.status_code != 503 or PAUSED not in response.text:
            return response
        await asyncio.sleep(FIRST_DELAY / 2)


async def _ask(http: httpx.AsyncClient, path: str) -> httpx.Response | httpx.HTTPError:
    try:
        return await request(http, "GET", path, CHECK)
    except httpx.HTTPError as error:
        return error


async def _health(http: httpx.AsyncClient) -> bool | None:
    """Whether the server runs and its engine lives; None if unknown, since the server may be busy."""
    answer = await _ask(http, "/health")
    if isinstance(answer, httpx.HTTPError):
        return False if isinstance(answer, httpx.ConnectError) else None
    return True if answer.is_success else False if answer.status_code == 503 else None


async def _tokens_computed(http: httpx.AsyncClient) -> dict[str, float]:
    """Tokens of prompts and of generations since the server's start, for all clients; empty if unknown."""
    text = await _text(http, "/metrics")
    return {kind: sum(float(n) for k, n in TOKENS.findall(text) if k == kind) for kind, _ in TOKENS.findall(text)}


async def _is_paused(http: httpx.AsyncClient) -> bool:
    """Whether the server reports that it is paused."""
    return re.search(r'"is_paused":\s*true', await _text(http, "/is_paused")) is not None


async def _text(http: httpx.AsyncClient, path: str) -> str:
    """A successful answer, or "": the waiting call and `_health` report errors."""
    answer = await _ask(http, path)
    return answer.text if isinstance(answer, httpx.Response) and answer.is_success else ""


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's certificates, read once because reading is slow."""
    return httpx.create_ssl_context()


def _message(response: httpx.Response) -> str:
    """The message in one of vLLM's two error formats, else the answer's first line."""
    try:
        body = response.json()
    except ValueError:
        return response.text.partition("\n")[0][:REASON].removesuffix(".")
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500].removesuffix(".")


# Routes


class ServerClient:
    """One server's routes. A failed call raises EngineError that names the call.

    timeout: seconds without any sign of progress after which a call fails, see `Connection`.
    patience: seconds during which a busy server, or one with an internal error, is retried; 0: no retries.
    run: a prefix of version labels, which distinguishes this run's weights from another run's.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, run: str = "", patience: float = 0.0) -> None:
        self.timeout, self.run, self.patience = timeout, run, patience
        self.connect(endpoint)

    def connect(self, endpoint: Endpoint) -> None:
        """Use the server at `endpoint` from now on."""
        self.connection = Connection(endpoint, self.timeout, self.patience)
        self.model = MODEL
        """The name that completions are requested from, `MODEL` or an adapter."""
        self.prepared = False
        """Whether a sync has prepared this server for the next ones."""
        self._running: Counter[str] = Counter()  # running requests by model
        self._running_lock = threading.Lock()

    @property
    def endpoint(self) -> Endpoint:
        return self.connection.endpoint

    @property
    def lost(self) -> ServerGone | None:
        """See `Connection`."""
        return self.connection.lost

    def get(self, path: str, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """The answer's JSON, or what `read` finds in it."""
        return asyncio.run(self.connection.request("GET", path, None, read))

    def post(
        self, path: str, body: dict[str, Any] | None = None, read: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        """The answer's JSON, or what `read` finds in it."""
        return asyncio.run(self.connection.request("POST", path, body, read))

    def _post_once(self, path: str, body: dict[str, Any]) -> None:
        """Post a part of a sync. A busy server may have executed it, so it counts as lost and gets a sync later."""
        try:
            self.post(path, body)
        except Refused as refused:
            raise (self.connection.gone(str(refused)) if self.connection.busy(refused) else refused) from None

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
            self._post_once("/start_weight_update", {})

    def update(self, info: dict[str, Any]) -> None:
        """Have the server load some of the weights; `info` is what its backend needs to find them."""
        self._post_once("/update_weights", {"update_info": info})

    def finish_update(self, version: int) -> None:
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
    futures = [run_in_thread(functools.partial(call, server), "call to a server") for server in servers]
    wait(futures)
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
    choices: Sequence[dict[str, Any]], request: Request, sampling: Sampling, version: int, *, synced: bool = False
) -> list[Completion]:
    """The `n` completions of a request from vLLM's choices, in order. Raises EngineError for a broken answer.

    version: of tokens without a label. synced: whether every server was synced before the request, so that any label
    must be a version of this run.
    """
    sampling = request.under(sampling)
    made = [_completion(choice, sampling, version, synced) for choice in choices]
    if sampling.temperature == 0:
        made *= request.n
    if len(made) != request.n:
        server = choices[0].get("server", "vLLM") if choices else "vLLM"
        raise EngineError(f"{server} returned {len(made)} completions of a prompt instead of {request.n}")
    return made


def _completion(choice: dict[str, Any], sampling: Sampling, version: int, synced: bool) -> Completion:
    server = choice.get("server", "vLLM")
    try:
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
    except (KeyError, TypeError) as error:
        raise EngineError(f"{server} returned a broken completion: {type(error).__name__}: {error}") from error
    wrong = next((one for one in logprobs if not -math.inf < one <= ROUNDING), None)
    if reason not in ("stop", "length") or len(ids) != len(logprobs) or not ids or wrong is not None:
        found = f'{len(ids)} tokens, {len(logprobs)} log-probs, finish reason "{reason}"'
        found += "" if wrong is None else f"; {wrong!r} is not a log-prob"
        raise EngineError(f"{server} returned a broken completion: {found}")
    labels = choice.get("weight_versions") or []
    if synced and (foreign := [one["version"] for one in labels if not isinstance(one["version"], int)]):
        raise EngineError(
            f'{server} answered with weights of version "{foreign[0]}", which this run has not sent: the server is '
            "new, or another program changes its weights"
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
