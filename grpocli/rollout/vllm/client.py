"""HTTP to a vLLM server: its RL endpoints, and completions from token ids to token ids."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from grpocli.errors import EngineError
from grpocli.http import BUSY, TooLong, bounded, is_loopback, pause
from grpocli.masking import mask
from grpocli.rollout.vllm.endpoint import Endpoint
from grpocli.rollout.vllm.progress_timeout import GENERATED, Patience, Signs, health, tokens_computed
from grpocli.rollout.vllm.protocol import ADAPTER, MODEL, KeepsRefusing, Refused, ServerGone

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
HEARTBEAT = 5.0  # seconds between looks at a server that an answer is awaited from
FIRST = -1  # priority: before every other request that waits
UNFINISHED = "unfinished"  # the version of weights that are a mixture
GENERATE = "/inference/v1/generate"  # token ids in, token ids out
REPEATABLE = (GENERATE, "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
"""Requests besides GET that may be retried: seeds are fixed, so completions are the same."""
LARGEST_ANSWER = 2**30
"""Bytes: several times what a group of the longest completions takes."""
FIRST_PAUSE = 0.5  # seconds, at most, before a server that is busy is asked again


class Client:
    """One server. What goes wrong with a call is an EngineError that says which call.

    timeout: seconds for a call in which nothing shows that the server works: it answers no call of this process and
    computes no token for anybody. So a request may queue in a busy server for longer, and a pause may wait for long
    completions; where the server is paused its requests wait too. After `LONGEST` times as long a call is given up.
    patience: seconds for which a busy server, or one with an internal error, is asked again; 0: no retries.
    run: tells this run's weights from another's at the same server.
    lost: what told that the server is gone, stuck, or replaced by another; None while it answers.
    """

    def __init__(self, endpoint: Endpoint, timeout: float, run: str = "", patience: float = 0.0) -> None:
        self.timeout, self.run, self.patience = timeout, run, patience
        self.connect(endpoint)

    def connect(self, endpoint: Endpoint) -> None:
        """Talk to the server at `endpoint` from now on; nothing is known of it yet."""
        self.endpoint, self.model, self.prepared = endpoint, MODEL, False
        self.lost: ServerGone | None = None
        self._accepted = False  # whether this server has taken our key
        self._numbered = False  # whether its weights have had one of our versions
        self._look_at = 0.0  # when it is due to be looked at, if a call waits for it
        self._signs = Signs()
        self._warned = -math.inf  # when it was last logged that it is busy
        self._under_way: Counter[str] = Counter()  # requests, by the model they ask for
        self._counting = threading.Lock()

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return asyncio.run(self._ask(self.endpoint, method, path, body))

    async def _ask(self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The answer's JSON, with retries while the server is busy.

        The time for retries begins anew whenever the server answers another request: our turn will come.
        """
        signs, began, tries = self._signs, 0.0, 0
        while True:
            try:
                return await self._once(endpoint, method, path, body)
            except Refused as refused:
                if not self._busy(refused) or (method != "GET" and path.partition("?")[0] not in REPEATABLE):
                    raise
                now, tries = time.monotonic(), tries + 1
                began = max(began or now, signs.served)
                left = began + self.patience - now
                if left <= 0:
                    problem = f"{refused}, for {self.patience:g} s (engine.patience)"
                    raise self._gone(endpoint, problem, KeepsRefusing) from refused
                if now > self._warned + self.patience:
                    self._warned = now
                    logger.warning("%s; asking it again for %g s (engine.patience)", refused, self.patience)
                await asyncio.sleep(min(pause(tries, FIRST_PAUSE, refused.answer), left))
            if self.lost and endpoint is self.endpoint:  # as another call has found
                raise ServerGone(str(self.lost))

    def _busy(self, refused: Refused) -> bool:
        return self.patience > 0 and refused.status in BUSY

    async def _once(self, endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """One try. While it is waited for, the server is looked at: one whose engine has died may keep us
        waiting for ever, and one that has much to do must not be given up."""
        signs = self._signs
        patience = Patience(signs, self.timeout)
        try:
            async with httpx.AsyncClient(**http_options(endpoint)) as http:
                call = asyncio.ensure_future(bounded(http, method, path, LARGEST_ANSWER, json=body))
                try:
                    while not (await asyncio.wait({call}, timeout=min(HEARTBEAT, patience.left)))[0]:
                        await self._look(endpoint, http, path, patience)
                finally:
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                response = call.result()
        except TooLong as error:
            raise EngineError(f"the vLLM server at {endpoint.url}, asked for {path}: {error}") from error
        except httpx.HTTPError as error:
            raise self._gone(endpoint, unreachable(endpoint, path, error)) from error
        signs.hear()
        if response.is_success:
            signs.served = signs.heard
            with well_formed(endpoint, path):
                return self._taken(response)
        raise await self._failure(endpoint, path, response)

    async def _look(self, endpoint: Endpoint, http: httpx.AsyncClient, path: str, patience: Patience) -> None:
        """Raises ServerGone where nothing listens any more, the engine is said to be dead, or patience is over.

        Of many calls that wait, one looks.
        """
        if time.monotonic() < self._look_at and patience.left:
            return
        self._look_at = time.monotonic() + HEARTBEAT
        where = f"the vLLM server at {endpoint.url}"
        if await health(http) is False:
            raise self._gone(endpoint, f"{where} died during {path}{endpoint.cause()}")
        await patience.signs.look(http, pause_counts=path == GENERATE)
        if not patience.left:
            raise self._gone(endpoint, f"{where} did not answer {path}, {patience.problem}")

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of one request, in order."""
        endpoint, model = self.endpoint, self.model
        with self._asking(model):
            answer = await self._ask(endpoint, "POST", GENERATE, {"model": model, **body})
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise EngineError(f"what answers {GENERATE} at {endpoint.url} is no vLLM server: {str(answer)[:100]}")
        choices: list[dict[str, Any]] = answer["choices"]
        with well_formed(endpoint, GENERATE):
            for choice in choices:
                choice["server"] = f"the vLLM server at {endpoint.url}"
                if choice.get("finish_reason") == "abort":
                    raise self._gone(endpoint, f"{choice['server']} is shutting down (it aborted requests)")
                for label in choice.get("weight_versions") or []:
                    label["version"] = self._version(endpoint, str(label["version"]))
            for choice in choices if model != MODEL else []:
                choice["weight_versions"] = _versions(model, choice)
            numbers = sorted(int(choice["index"]) for choice in choices)
            if numbers != list(range(len(choices))):
                raise ValueError(f"its completions are numbered {numbers}")
            return sorted(choices, key=lambda choice: int(choice["index"]))

    async def generated(self) -> float:
        """Tokens that the server has generated since its start, for all clients; 0 where it does not say."""
        async with httpx.AsyncClient(**http_options(self.endpoint)) as http:
            return await tokens_computed(http, GENERATED) or 0.0

    @contextmanager
    def _asking(self, model: str) -> Iterator[None]:
        counting, under_way = self._counting, self._under_way  # of this server, should another take its place
        with counting:
            under_way[model] += 1
        try:
            yield
        finally:
            with counting:
                under_way[model] -= 1
                if not under_way[model]:
                    del under_way[model]

    def _taken(self, response: httpx.Response) -> Any:
        self._accepted = True
        return response.json() if "json" in response.headers.get("content-type", "") else None

    async def _failure(self, endpoint: Endpoint, path: str, response: httpx.Response) -> EngineError:
        """A server whose engine has died answers too, and so does another one that took its place."""
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
        if endpoint is self.endpoint:  # else it has been replaced meanwhile
            self.lost = error
        return error

    def _version(self, endpoint: Endpoint, label: str) -> int | str:
        """Our version, or the label of weights that this run has not sent; not once the server has had ours."""
        run, dot, number = label.rpartition(".")
        if dot and run == self.run and number.isdecimal():
            self._numbered = True
            return int(number)
        if self._numbered and label != UNFINISHED:
            where = f"the vLLM server at {endpoint.url}"
            if dot:
                raise EngineError(f"another run has changed the weights of {where}: a server is for one run at a time")
            raise self._gone(endpoint, f"{where} was started again by somebody")
        return label

    def _post_once(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Post a part of a sync that cannot be retried by itself.

        A busy server may have done it or not, so it counts as lost, and gets a whole sync when it is found again.
        """
        try:
            self.post(path, body)
        except Refused as refused:
            if not self._busy(refused):
                raise
            raise self._gone(self.endpoint, str(refused)) from refused

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._post_once("/init_weight_transfer_engine", {"init_info": info})

    def pause(self, mode: str = "wait") -> None:
        self.post(f"/pause?mode={mode}")

    def resume(self) -> None:
        self.post("/resume")

    def start_update(self) -> None:
        try:
            self.post("/start_weight_update")
        except Refused:
            self.abandon_update()
            self._post_once("/start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        self._post_once("/update_weights", {"update_info": info})

    def finish_update(self, version: int) -> None:
        self._post_once("/finish_weight_update", {"weight_version": f"{self.run}.{version}"})

    def abandon_update(self) -> None:
        try:
            self.post("/finish_weight_update", {})
        except Refused:  # there is none
            return
        self.post("/update_weight_version", {"new_version": UNFINISHED})

    def reset_prefix_cache(self, running: bool = False) -> None:
        with well_formed(self.endpoint, "/reset_prefix_cache"):
            dropped = self.post(f"/reset_prefix_cache?reset_running_requests={str(running).lower()}")["success"]
        if not dropped:
            raise EngineError(f"the vLLM server at {self.endpoint.url} could not drop its prefix cache: requests run")

    def weight_version(self) -> int | str:
        with well_formed(self.endpoint, "/weight_info"):
            return self._version(self.endpoint, str(self.get("/weight_info")["weight_version"]))

    def set_version(self, version: int) -> None:
        self.post("/update_weight_version", {"new_version": f"{self.run}.{version}"})

    def adapters(self) -> dict[str, Path]:
        with well_formed(self.endpoint, "/v1/models"):
            return {card["id"]: Path(card["root"]) for card in self.get("/v1/models")["data"] if card.get("parent")}

    def adapters_in_use(self) -> set[str]:
        with self._counting:
            return set(self._under_way) - {MODEL}

    def load_adapter(self, name: str, folder: Path) -> None:
        self._post_once("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        self._post_once("/v1/unload_lora_adapter", {"lora_name": name})

    def world_size(self) -> int:
        with well_formed(self.endpoint, "/get_world_size"):
            return int(self.get("/get_world_size")["world_size"])

    def score(self, token_ids: Sequence[int], first: bool = False) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, **({"priority": FIRST} if first else {})}
        with well_formed(self.endpoint, GENERATE):
            entries = self.post(GENERATE, {"model": self.model, **body})["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids[1:], strict=True)]

    def sample(self, token_ids: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        sampling = {"max_tokens": tokens, "temperature": 1, "seed": 0, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "priority": FIRST}
        with well_formed(self.endpoint, GENERATE):
            (choice,) = self.post(GENERATE, {"model": self.model, **body})["choices"]
            return choice["token_ids"], [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]


@contextmanager
def well_formed(endpoint: Endpoint, path: str) -> Iterator[None]:
    """Raise EngineError for an answer of an unexpected form, from a proxy for example."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"what answers {path} at {endpoint.url} is no vLLM server, or answers wrongly"
        raise EngineError(f"{problem}: {type(error).__name__}: {error}") from error


def http_options(endpoint: Endpoint) -> dict[str, Any]:
    """Proxies are for other machines; connections are not kept, since an idle one may be closed under us.

    Only connecting has a deadline of httpx: for the rest `Patience` has one.
    """
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
    """Slow to read, so once for all calls."""
    return httpx.create_ssl_context()


def unreachable(endpoint: Endpoint, path: str, error: httpx.HTTPError) -> str:
    """Why there was no answer."""
    return f"the vLLM server at {endpoint.url} is gone ({path}: {str(error) or type(error).__name__}){endpoint.cause()}"


def _versions(adapter: str, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A request keeps its adapter to its end, whatever version the server has by then."""
    version = int(adapter.removeprefix(ADAPTER).partition(".")[0])
    return [{"version": version, "start": 0, "end": len(choice["token_ids"])}]


def _message(response: httpx.Response) -> str:
    """What vLLM says in one of its two error formats, else the answer's first line."""
    try:
        body = response.json()
    except ValueError:
        return response.text.partition("\n")[0][:300].removesuffix(".")
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500].removesuffix(".")
