"""A vLLM server over HTTP: completions from token ids to token ids, weight transfers, adapters and the probe."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from grpocli.errors import EngineError
from grpocli.http import BUSY, is_loopback, retry_delay
from grpocli.rollout.vllm.liveness import GENERATED, Liveness, ProgressTimeout, health, tokens_computed
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.text import mask

T = TypeVar("T")
logger = logging.getLogger(__name__)

MODEL = "policy"
"""The name of the served model."""
ADAPTER = f"{MODEL}-v"
"""With LoRA each update is an adapter with this name and its version."""
CONNECT_TIMEOUT = 10.0
HEARTBEAT = 5.0  # seconds between checks of a server while an answer is awaited
FIRST = -1  # priority above all waiting requests
UNFINISHED = "unfinished"  # the version label of a mixture of weights
CANARY = "canary"  # in place of a version: weights that are sent as a test only (`canary.py`)
GENERATE = "/inference/v1/generate"  # token ids in, token ids out
REPEATABLE = (GENERATE, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
"""Requests besides GET that may be retried; with fixed seeds completions are the same."""
"""Bytes of an answer: several times the size of a group of the longest completions."""
FIRST_DELAY = 0.5  # seconds at most before the first retry at a busy server
PAUSED = "Generation is paused"  # with 503, the answer of vLLM 0.33 to a request during a pause; 0.32 holds the request
PAUSED_DELAY = 0.25  # seconds before such a request is repeated


class Refused(EngineError):
    """The server answered with an HTTP error. answer: the response."""

    def __init__(self, url: str, path: str, answer: httpx.Response, message: str) -> None:
        super().__init__(f"the vLLM server at {url} refused {path} ({answer.status_code}): {message}")
        self.status, self.path, self.answer = answer.status_code, path, answer


class ServerGone(EngineError):
    """The server cannot be reached, did not answer in time, or its engine died; a new server must take its place."""


class KeepsRefusing(ServerGone):
    """The server answers, but has been busy or failing for longer than `engine.patience`."""


class ServerClient:
    """One server. A failed call raises EngineError that names the call.

    timeout: seconds without any sign of progress after which a call fails (`liveness.py`); a call may last longer while
        the server computes tokens for other requests, or while it is paused.
    patience: seconds during which a busy server, or one with an internal error, is retried; 0: no retries.
    run: a prefix of version labels, which distinguishes this run's weights from another run's.
    model: the name that completions are requested from, `MODEL` or an adapter.
    prepared: whether `init_transfer` has prepared this server; False again after `connect`.
    proven: whether this server has followed a canary, or filled its caches under random weights; False again after
        `connect`.
    lost: the error by which the server was found gone, stuck or replaced; None while it answers.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, run: str = "", patience: float = 0.0) -> None:
        self.timeout, self.run, self.patience = timeout, run, patience
        self.connect(endpoint)

    def connect(self, endpoint: Endpoint) -> None:
        """Use the server at `endpoint` from now on."""
        self.endpoint, self.model, self.prepared, self.proven = endpoint, MODEL, False, False
        self.lost: ServerGone | None = None
        self._accepted = False  # whether this server has accepted our key
        self._numbered = False  # whether its weights have carried a version of this run
        self._next_check = 0.0  # the time of the next check while calls wait
        self._liveness = Liveness()
        self._warned = -math.inf  # the time of the last log line about a busy server
        self._running: Counter[str] = Counter()  # running requests by model
        self._running_lock = threading.Lock()

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return asyncio.run(self._request(self.endpoint, method, path, body))

    async def _request(self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The answer's JSON, with retries while the server is busy.

        Patience restarts whenever the server answers another request, because this one's turn will come.
        """
        liveness, began, tries = self._liveness, 0.0, 0
        while True:
            try:
                return await self._once(endpoint, method, path, body)
            except Refused as refused:
                if not self._busy(refused) or (method != "GET" and path.partition("?")[0] not in REPEATABLE):
                    raise
                now, tries = time.monotonic(), tries + 1
                began = max(began or now, liveness.served)
                left = began + self.patience - now
                if left <= 0:
                    problem = f"{refused}, for {self.patience:g} s (engine.patience)"
                    raise self._gone(endpoint, problem, KeepsRefusing) from refused
                if now > self._warned + self.patience:
                    self._warned = now
                    logger.warning("%s; repeating the request for %g s (engine.patience)", refused, self.patience)
                await asyncio.sleep(min(retry_delay(tries, FIRST_DELAY, refused.answer), left))
            if self.lost and endpoint is self.endpoint:  # found by another call
                raise ServerGone(str(self.lost))

    def _busy(self, refused: Refused) -> bool:
        return self.patience > 0 and refused.status in BUSY

    async def _once(self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """One attempt, which checks the server while it waits: a dead engine may never answer, a busy one may yet."""
        liveness = self._liveness
        timeout = ProgressTimeout(liveness, self.timeout)
        try:
            async with httpx.AsyncClient(**http_options(endpoint)) as http:
                call = asyncio.ensure_future(_after_a_pause(http, method, path, body))
                try:
                    while not (await asyncio.wait({call}, timeout=min(HEARTBEAT, timeout.left)))[0]:
                        await self._check(endpoint, http, path, timeout)
                finally:
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                response = call.result()
        except httpx.HTTPError as error:
            raise self._gone(endpoint, unreachable(endpoint, path, error)) from error
        liveness.note()
        if response.is_success:
            liveness.served = liveness.last_sign
            with well_formed(endpoint, path):
                return self._content(response)
        raise await self._failure(endpoint, path, response)

    async def _check(self, endpoint: Endpoint, http: httpx.AsyncClient, path: str, timeout: ProgressTimeout) -> None:
        """Raise ServerGone if nothing listens any more, the engine is dead, or the timeout has passed.

        One of the waiting calls checks for all.
        """
        if time.monotonic() < self._next_check and timeout.left:
            return
        self._next_check = time.monotonic() + HEARTBEAT
        where = f"the vLLM server at {endpoint.url}"
        if await health(http) is False:
            raise self._gone(endpoint, f"{where} died during {path}{endpoint.cause()}")
        await timeout.liveness.check(http, pause_counts=path == GENERATE)
        if not timeout.left:
            raise self._gone(endpoint, f"{where} did not answer {path}, {timeout.problem}")

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of one request, in order."""
        endpoint, model = self.endpoint, self.model
        with self._counted(model):
            answer = await self._request(endpoint, "POST", GENERATE, {"model": model, **body})
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise EngineError(
                f"the answer to {GENERATE} at {endpoint.url} is not from a vLLM server: {str(answer)[:100]}"
            )
        choices: list[dict[str, Any]] = answer["choices"]
        with well_formed(endpoint, GENERATE):
            for choice in choices:
                choice["server"] = f"the vLLM server at {endpoint.url}"
                if choice.get("finish_reason") == "abort":
                    raise self._gone(endpoint, f"{choice['server']} is shutting down (it aborted requests)")
                for label in choice.get("weight_versions") or []:
                    label["version"] = self._version(endpoint, str(label["version"]))
                    if label["version"] == CANARY:
                        raise EngineError(f"{choice['server']} sampled with a canary's weights before its sync ended")
            for choice in choices if model != MODEL else []:
                choice["weight_versions"] = _versions(model, choice)
            numbers = sorted(int(choice["index"]) for choice in choices)
            if numbers != list(range(len(choices))):
                raise ValueError(f"its completions are numbered {numbers}")
            return sorted(choices, key=lambda choice: int(choice["index"]))

    async def generated(self) -> float:
        """Tokens that the server has generated since its start, for all clients; 0 if unknown."""
        async with httpx.AsyncClient(**http_options(self.endpoint)) as http:
            return await tokens_computed(http, GENERATED) or 0.0

    @contextmanager
    def _counted(self, model: str) -> Iterator[None]:
        """Count a running request for `adapters_in_use`."""
        lock, running = self._running_lock, self._running  # of this server, since `connect` replaces them
        with lock:
            running[model] += 1
        try:
            yield
        finally:
            with lock:
                running[model] -= 1
                if not running[model]:
                    del running[model]

    def _content(self, response: httpx.Response) -> Any:
        self._accepted = True
        return response.json() if "json" in response.headers.get("content-type", "") else None

    async def _failure(self, endpoint: Endpoint, path: str, response: httpx.Response) -> EngineError:
        """The error of a failed response: ServerGone if the engine has died or another server took its place."""
        refused = Refused(endpoint.url, path, response, _message(response))
        unknown_adapter = response.status_code == 404 and path == GENERATE and self.model != MODEL
        replaced = unknown_adapter or (response.status_code == 401 and self._accepted)
        if response.status_code >= 500:
            async with httpx.AsyncClient(**http_options(endpoint)) as http:
                if await health(http) is not True:
                    return self._gone(endpoint, f"{refused}{endpoint.cause()}")
        return self._gone(endpoint, str(refused)) if replaced else refused

    def _gone(self, endpoint: Endpoint, problem: str, kind: type[ServerGone] = ServerGone) -> ServerGone:
        error = kind(problem)
        if endpoint is self.endpoint:  # otherwise `connect` has replaced it meanwhile
            self.lost = error
        return error

    def _version(self, endpoint: Endpoint, label: str) -> int | str:
        """The version of this run's weights, or the label of other weights.

        Raises EngineError for other weights after the server received this run's.
        """
        run, dot, number = label.rpartition(".")
        if dot and run == self.run and number.isdecimal():
            self._numbered = True
            return int(number)
        if dot and run == self.run and number == CANARY:
            return CANARY
        if self._numbered and label != UNFINISHED:
            where = f"the vLLM server at {endpoint.url}"
            if dot:
                raise EngineError(f"another run has changed the weights of {where}: a server is for one run at a time")
            raise self._gone(endpoint, f"{where} was started again")
        return label

    def _post_once(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Post a part of a sync that cannot be retried alone.

        A busy server may have executed it or not, so the server counts as lost and gets a whole sync later.
        """
        try:
            self.post(path, body)
        except Refused as refused:
            if not self._busy(refused):
                raise
            raise self._gone(self.endpoint, str(refused)) from refused

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Prepare the server's side of the weight transfer with its backend's settings."""
        self._post_once("/init_weight_transfer_engine", {"init_info": info})

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
        with well_formed(self.endpoint, "/reset_prefix_cache"):
            dropped = self.post(f"/reset_prefix_cache?reset_running_requests={str(running).lower()}")["success"]
        if not dropped:
            raise EngineError(
                f"the vLLM server at {self.endpoint.url} did not clear its prefix cache because requests are running"
            )

    def weight_version(self) -> int | str:
        """The version of this run's weights, or the label of other weights."""
        with well_formed(self.endpoint, "/weight_info"):
            return self._version(self.endpoint, str(self.get("/weight_info")["weight_version"]))

    def set_version(self, version: int) -> None:
        """Label the server with a version without a weight update, after an adapter was loaded."""
        self.post("/update_weight_version", {"new_version": f"{self.run}.{version}"})

    def adapters(self) -> dict[str, Path]:
        """The folder of each loaded adapter, by name."""
        with well_formed(self.endpoint, "/v1/models"):
            return {card["id"]: Path(card["root"]) for card in self.get("/v1/models")["data"] if card.get("parent")}

    def adapters_in_use(self) -> set[str]:
        """Adapters that running requests of this process use."""
        with self._running_lock:
            return set(self._running) - {MODEL}

    def load_adapter(self, name: str, folder: Path) -> None:
        self._post_once("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        self._post_once("/v1/unload_lora_adapter", {"lora_name": name})

    def world_size(self) -> int:
        """The number of the server's processes that hold weights."""
        with well_formed(self.endpoint, "/get_world_size"):
            return int(self.get("/get_world_size")["world_size"])

    def score(self, token_ids: Sequence[int], first: bool = False) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1; first: before waiting requests."""
        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, **({"priority": FIRST} if first else {})}
        with well_formed(self.endpoint, GENERATE):
            entries = self.post(GENERATE, {"model": self.model, **body})["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids[1:], strict=True)]

    def sample(self, token_ids: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Sample `tokens` more with a fixed seed, before waiting requests; their ids and log-probs at temperature 1."""
        sampling = {"max_tokens": tokens, "temperature": 1, "seed": 0, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "priority": FIRST}
        with well_formed(self.endpoint, GENERATE):
            (choice,) = self.post(GENERATE, {"model": self.model, **body})["choices"]
            return choice["token_ids"], [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]


async def _after_a_pause(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> httpx.Response:
    """The answer, for which the request waits until the server is not paused, as if the server had held it."""
    while True:
        response = await http.request(method, path, json=body)
        if response.status_code != 503 or PAUSED not in response.text:
            return response
        await asyncio.sleep(PAUSED_DELAY)


@contextmanager
def well_formed(endpoint: Endpoint, path: str) -> Iterator[None]:
    """Raise EngineError for an answer of an unexpected form, for example a proxy's."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"the answer to {path} at {endpoint.url} is not from a vLLM server, or invalid"
        raise EngineError(f"{problem}: {type(error).__name__}: {error}") from error


def http_options(endpoint: Endpoint) -> dict[str, Any]:
    """httpx's arguments: a proxy only for other machines; a timeout only to connect, see `ProgressTimeout`."""
    host = urlsplit(endpoint.url).hostname or ""
    mask(endpoint.api_key, "(the server's key)")
    return {
        "base_url": endpoint.url,
        "headers": {"Authorization": f"Bearer {endpoint.api_key}"},
        "timeout": httpx.Timeout(None, connect=CONNECT_TIMEOUT),
        "trust_env": not is_loopback(host),
        "verify": _certificates() if endpoint.url.startswith("https") else False,
    }


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's certificates, read once because reading is slow."""
    return httpx.create_ssl_context()


def unreachable(endpoint: Endpoint, path: str, error: httpx.HTTPError) -> str:
    """The message for a call without an answer."""
    return f"the vLLM server at {endpoint.url} is gone ({path}: {str(error) or type(error).__name__}){endpoint.cause()}"


def _versions(adapter: str, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The version of an adapter, as vLLM labels it: a request keeps its adapter to its end."""
    version = int(adapter.removeprefix(ADAPTER).partition(".")[0])
    return [{"version": version, "start": 0, "end": len(choice["token_ids"])}]


def _message(response: httpx.Response) -> str:
    """The message in one of vLLM's two error formats, else the answer's first line."""
    try:
        body = response.json()
    except ValueError:
        return response.text.partition("\n")[0][:300].removesuffix(".")
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500].removesuffix(".")


def call_all(servers: Sequence[ServerClient], call: Callable[[ServerClient], T]) -> list[T]:
    """Call all servers concurrently and wait for all; then raise the first server's error, if any."""
    if len(servers) == 1:
        return [call(servers[0])]
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(call, server) for server in servers]
    return [future.result() for future in futures]


def init_transfers(servers: Sequence[ServerClient], infos: Sequence[dict[str, object]]) -> None:
    """Prepare every server for transfers, each with its own settings."""
    each_info = dict(zip(map(id, servers), infos, strict=True))

    def init(server: ServerClient) -> None:
        server.init_transfer(each_info[id(server)])
        server.prepared = True

    call_all(servers, init)
