"""HTTP to a vLLM server: its RL endpoints, and completions from token ids to token ids."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from grpocli.errors import EngineError
from grpocli.rollout.vllm.endpoint import Endpoint
from grpocli.rollout.vllm.log import failure_cause

AT_ONCE = 64  # requests under way; each may hold several sequences, and the server queues what it cannot run
CONNECT_TIMEOUT = 10.0
MODEL = "policy"  # the name under which the server offers its model
GENERATE = "/inference/v1/generate"  # token ids in, token ids out


class Client:
    """One server. Every call has `timeout` seconds; what goes wrong is an EngineError that says which call."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.endpoint, self.timeout = endpoint, timeout
        self.model = MODEL
        self._http = httpx.Client(**self._options())

    def close(self) -> None:
        self._http.close()

    def _options(self) -> dict[str, Any]:
        """Proxies are for other machines; connections are not kept, since an idle one may be closed under us."""
        host = urlsplit(self.endpoint.url).hostname or ""
        return {
            "base_url": self.endpoint.url,
            "headers": {"Authorization": f"Bearer {self.endpoint.api_key}"},
            "timeout": httpx.Timeout(self.timeout, connect=CONNECT_TIMEOUT),
            "limits": httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0),
            "trust_env": not is_loopback(host),
            "verify": self.endpoint.url.startswith("https"),
        }

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(path, error) from error
        return self._answer(path, response)

    def _unreachable(self, path: str, error: httpx.HTTPError) -> EngineError:
        where = f"the vLLM server at {self.endpoint.url}"
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return EngineError(f"{where} did not answer {path} within {self.timeout:g} s (engine.request_timeout)")
        log = self.endpoint.log
        cause = failure_cause(Path(log)) if log else ""
        return EngineError(f"{where} is gone ({path}: {error or type(error).__name__}){cause}")

    def _answer(self, path: str, response: httpx.Response) -> Any:
        if response.is_success:
            return response.json() if response.content else None
        raise Refused(self.endpoint.url, path, response.status_code, _message(response))

    def init_transfer(self) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": {}})

    def pause(self) -> None:
        """Let running requests end, hold new ones."""
        self.post("/pause?mode=wait")

    def resume(self) -> None:
        self.post("/resume")

    def start_update(self) -> None:
        """Begin an update; one that another trainer left unfinished is closed first."""
        try:
            self.post("/start_weight_update")
        except Refused:
            self.post("/finish_weight_update", {})
            self.post("/start_weight_update")

    def update(self, file: str) -> None:
        self.post("/update_weights", {"update_info": {"file": file}})

    def finish_update(self, version: int) -> None:
        self.post("/finish_weight_update", {"weight_version": str(version)})

    def reset_prefix_cache(self) -> None:
        if not self.post("/reset_prefix_cache")["success"]:
            raise EngineError(f"the vLLM server at {self.endpoint.url} could not drop its prefix cache: requests run")

    def weight_version(self) -> str:
        return str(self.get("/weight_info")["weight_version"])

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1."""
        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        entries = self.post(GENERATE, {"model": self.model, **body})["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for entry, token in zip(entries, token_ids[1:], strict=True)]

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The choices of each request to generate, in order; at most `AT_ONCE` are under way.

        The first failure cancels the others.
        """
        return asyncio.run(self._complete(bodies))

    async def _complete(self, bodies: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        turn = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(**self._options()) as http:

            async def one(body: dict[str, Any]) -> list[dict[str, Any]]:
                async with turn:
                    try:
                        response = await http.post(GENERATE, json={"model": self.model, **body})
                    except httpx.HTTPError as error:
                        raise self._unreachable(GENERATE, error) from error
                choices: list[dict[str, Any]] = self._answer(GENERATE, response)["choices"]
                return sorted(choices, key=lambda choice: int(choice["index"]))

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(body)) for body in bodies]
            except* EngineError as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


class Refused(EngineError):
    """The server answered, with an error."""

    def __init__(self, url: str, path: str, status: int, message: str) -> None:
        super().__init__(f"the vLLM server at {url} refused {path} ({status}): {message}")
        self.status = status


def _message(response: httpx.Response) -> str:
    """What vLLM says in one of its two error formats, else the answer's first line."""
    try:
        body = response.json()
    except ValueError:
        return response.text.partition("\n")[0][:300]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
