"""The middleware that requires the key on every route of a vLLM server but /health."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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


UPPER = f"Bearer {KEY.upper()}"
REFUSED = [
    *([], bearer("wrong"), bearer(KEY[:-1]), bearer(KEY + "x"), bearer(""), bearer(KEY, "Basic")),
    *([(b"authorization", KEY.encode())], [(b"x-api-key", KEY.encode())], [(b"cookie", f"key={KEY}".encode())]),
    *(bearer("wrong") + bearer(KEY), bearer(f"{KEY}, Bearer wrong"), [(b"authorization", UPPER.encode())]),
]


@pytest.mark.parametrize("headers", REFUSED)
def test_http_without_the_key_is_401(headers: list[tuple[bytes, bytes]]) -> None:
    query = {"query_string": f"key={KEY}&api_key={KEY}".encode()}
    start, body = ask("http", "/update_weights", headers, "POST", **query)
    assert (start["type"], start["status"]) == ("http.response.start", 401)
    assert KEY.encode() not in body["body"]


@pytest.mark.parametrize("headers", [bearer(KEY), bearer(KEY, "bearer"), [(b"Authorization", bearer(KEY)[0][1])]])
def test_the_right_key_is_accepted(headers: list[tuple[bytes, bytes]]) -> None:
    assert ask("http", "/update_weights", headers, "POST") == [{"type": "reached"}]
    assert ask("websocket", "/v1/realtime", headers) == [{"type": "reached"}]
    assert ask("lifespan", "", []) == [{"type": "reached"}]


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_key_no_server_starts(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert RequireKey(app)._is_authorized({"headers": bearer(KEY)})
    monkeypatch.delenv("VLLM_API_KEY") if value is None else monkeypatch.setenv("VLLM_API_KEY", value)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        RequireKey(app)


TRICKY = [
    *("/update_weights", "/metrics", "/health/../update_weights", "/health//", "//health", "/./health"),
    *("/health/inner", "/health;x", "/health?x", "/health%2f", "/Health", "/health ", "/health\x00"),
    *("", "http://x/health", "/x/health"),
]


def test_no_path_or_method_bypasses_the_key() -> None:
    """Servers decode the path first, so the checked path is the routed one."""
    for path, method in [*((path, "GET") for path in TRICKY), ("/health", "POST"), ("/health", "get")]:
        start, _ = ask("http", path, [], method, raw_path=b"/health", root_path="/health")
        assert start["status"] == 401, (path, method)
    for path in ("/v1/realtime", "/health"):
        assert ask("websocket", path, []) == [{"type": "websocket.close", "code": 1008}]
    assert ask("http", "/health", [], raw_path=b"/%68ealth") == [{"type": "reached"}]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`secrets.compare_digest` compares digests of one length, whatever the length of the sent key."""
    compare = Mock(side_effect=secrets.compare_digest)
    monkeypatch.setattr("grpocli.rollout.vllm.api_server.secrets.compare_digest", compare)
    for key in ("", "x", KEY, KEY * 100):
        ask("http", "/pause", bearer(key), "POST")
    assert [[len(one) for one in call.args] for call in compare.call_args_list] == [[32, 32]] * 4


def test_a_key_file_is_private_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if an older file or the umask would let others read it."""
    assert KEY not in repr(Endpoint("http://127.0.0.1:1", KEY, "/dev/shm/x"))
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
