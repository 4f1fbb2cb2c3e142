"""The middleware that requires the key on every route of a vLLM server but /health."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from grpocli.rollout.vllm.api_server import RequireKey
from grpocli.rollout.vllm.server_files import Endpoint

KEY = "s3cret-key"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "reached"})


def ask(kind: str, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET", **more: Any) -> list[Any]:
    """The client's response; `reached` if the request passed the check."""
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
def test_the_right_key_is_accepted(headers: list[tuple[bytes, bytes]]) -> None:
    assert ask("http", "/update_weights", headers, "POST") == [{"type": "reached"}]
    assert ask("websocket", "/v1/realtime", headers) == [{"type": "reached"}]


def test_health_needs_no_key_for_reading_only() -> None:
    assert ask("http", "/health", []) == [{"type": "reached"}]
    assert ask("http", "/health", [], "POST")[0]["status"] == 401
    assert ask("websocket", "/health", [])[0]["type"] == "websocket.close"


def test_a_websocket_without_the_key_is_closed() -> None:
    assert ask("websocket", "/v1/realtime", bearer("wrong")) == [{"type": "websocket.close", "code": 1008}]


def test_lifespan_events_need_no_key() -> None:
    assert ask("lifespan", "", []) == [{"type": "reached"}]


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_key_no_server_starts(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_API_KEY", value)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        RequireKey(app)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert RequireKey(app)._is_authorized({"headers": bearer(KEY)})


class Routes:
    """An application like vLLM's: routes, a mounted application, a websocket, optionally behind a prefix."""

    def __init__(self, root_path: str = "") -> None:
        pytest.importorskip("fastapi")
        from fastapi import FastAPI, WebSocket
        from starlette.types import Receive, Scope, Send

        self.reached: list[str] = []
        web = FastAPI()
        web.root_path = root_path
        web.get("/health")(lambda: self.reached.append("health"))
        web.post("/update_weights")(lambda: self.reached.append("update"))

        async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
            self.reached.append("metrics")

        async def realtime(websocket: WebSocket) -> None:
            self.reached.append("websocket")

        web.mount("/metrics", mounted)
        web.mount("/health/inner", mounted)
        web.websocket("/v1/realtime")(realtime)
        web.add_middleware(RequireKey, key=KEY)
        self.web = web

    def ask(self, path: str, method: str = "POST", kind: str = "http", **more: Any) -> int | None:
        """The status, or None for a closed websocket."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request" if kind == "http" else "websocket.connect", "body": b""}

        scope = {"type": kind, "path": path, "raw_path": path.encode(), "method": method, "headers": []}
        asyncio.run(self.web(scope | {"query_string": b"", "server": ("x", 80), "root_path": ""} | more, receive, send))
        return next((message["status"] for message in sent if "status" in message), None)


TRICKY = [
    *("/update_weights", "/health/../update_weights", "/health/..", "/health//", "//health", "/./health", "/health/."),
    *("/health/inner", "/health/inner/", "/metrics", "/metrics/", "/health;x", "/health?x", "/health#", "/health%2f"),
    *("/Health", " /health", "/health ", "/health\x00", "\\health", "", "*", "http://x/health", "/x/health"),
]


@pytest.mark.parametrize("path", TRICKY)
@pytest.mark.parametrize("root_path", ["", "/x", "/health"])
def test_no_path_or_method_bypasses_the_key(path: str, root_path: str) -> None:
    routes = Routes(root_path)
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X"):
        assert routes.ask(path, method) == 401, method
        assert routes.ask(path, method, root_path="/health") == 401, method
    assert routes.ask("/v1/realtime", kind="websocket") is None
    assert routes.ask("/health", kind="websocket") is None
    assert routes.reached == []
    assert routes.ask("/health", "GET") in (200, 404)  # open where it exists
    assert routes.reached in ([], ["health"])


def test_only_health_itself_is_open_however_it_is_encoded() -> None:
    """Servers decode the path first, so the checked path is the routed one."""
    routes = Routes()
    assert routes.ask("/health", "GET", raw_path=b"/%68ealth") == 200
    assert routes.ask("/update_weights", raw_path=b"/health") == 401
    assert routes.reached == ["health"]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`secrets.compare_digest` compares digests of one length, whatever the length of the sent key."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("grpocli.rollout.vllm.api_server.secrets.compare_digest", compare)
    for key in ("", "x", KEY, KEY * 100):
        ask("http", "/pause", bearer(key), "POST")
    assert len(compared) == 4
    assert {len(one) for pair in compared for one in pair} == {32}


def test_a_key_in_another_header_or_the_query_is_refused() -> None:
    query = {"query_string": f"key={KEY}&api_key={KEY}&token={KEY}".encode()}
    assert ask("http", "/pause", [], "POST", **query)[0]["status"] == 401
    assert ask("http", "/pause", [(b"cookie", f"key={KEY}".encode())], "POST")[0]["status"] == 401
    for value in (f"Bearer {KEY}, Bearer wrong", f"Bearer wrong {KEY}", f"Bearer{KEY}", f"Bearer {KEY.upper()}"):
        assert ask("http", "/pause", [(b"authorization", value.encode())], "POST")[0]["status"] == 401


def test_repr_and_str_do_not_show_the_key() -> None:
    assert KEY not in repr(Endpoint("http://127.0.0.1:1", KEY, "/dev/shm/x"))


def test_a_key_file_is_private_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if an older file or the umask would let others read it."""
    modes: list[int] = []
    opened = os.open

    def look(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT:  # not the folder, which is flushed
            modes.append(mode)
        return opened(path, flags, mode, **more)

    file = tmp_path / "serve" / "8000.json"
    file.parent.mkdir()
    file.touch(mode=0o666)
    monkeypatch.setattr("grpocli.files.os.open", look)
    before = os.umask(0)
    try:
        Endpoint("http://127.0.0.1:1", KEY, "/dev/shm/x").save(file)
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == [file.name]
