"""The middleware that closes every route of a vLLM server but /health."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpocli.rollout.vllm.auth import RequireKey

KEY = "s3cret-key"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "reached"})


def ask(kind: str, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET", **more: Any) -> list[Any]:
    """What the client gets to see; `reached` where the request came through."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": f"{kind}.connect"}

    scope = {"type": kind, "path": path, "method": method, "headers": headers} | more
    asyncio.run(RequireKey(app, KEY)(scope, receive, send))
    return sent


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"{scheme} {key}".encode())]


@pytest.mark.parametrize(
    "path", ["/update_weights", "/v1/completions", "/", "/health/", "/healthy", "//health", "/HEALTH"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer("wrong"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(""),
        bearer(KEY, "Basic"),
        [(b"authorization", KEY.encode())],
        [(b"x-api-key", KEY.encode())],
        bearer("wrong") + bearer(KEY),
    ],
)
def test_http_without_the_key_is_401(path: str, method: str, headers: list[tuple[bytes, bytes]]) -> None:
    start, body = ask("http", path, headers, method)
    assert (start["type"], start["status"]) == ("http.response.start", 401)
    assert KEY.encode() not in body["body"]


@pytest.mark.parametrize(
    "headers", [bearer(KEY), bearer(KEY, "bearer"), [(b"Authorization", f"Bearer {KEY}".encode())]]
)
def test_the_key_opens(headers: list[tuple[bytes, bytes]]) -> None:
    assert ask("http", "/update_weights", headers, "POST") == [{"type": "reached"}]
    assert ask("websocket", "/v1/realtime", headers) == [{"type": "reached"}]


def test_health_is_open_for_reading_only() -> None:
    assert ask("http", "/health", []) == [{"type": "reached"}]
    assert ask("http", "/health", [], "POST")[0]["status"] == 401
    assert ask("websocket", "/health", [])[0]["type"] == "websocket.close"


def test_websocket_without_the_key() -> None:
    assert ask("websocket", "/v1/realtime", bearer("wrong")) == [{"type": "websocket.close", "code": 1008}]
    answer = ask("websocket", "/v1/realtime", [], extensions={"websocket.http.response": {}})
    assert (answer[0]["type"], answer[0]["status"]) == ("websocket.http.response.start", 401)


def test_lifespan_passes() -> None:
    assert ask("lifespan", "", []) == [{"type": "reached"}]


@pytest.mark.parametrize("value", [None, ""])
def test_no_key_no_server(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_API_KEY", value)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        RequireKey(app)


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert RequireKey(app)._authorized({"headers": bearer(KEY)})
