"""ASGI middleware for vLLM's server: every route but `/health` needs the key.

vLLM's own check covers only some prefixes; with its RL endpoints enabled, any client could change weights or call the
workers. `--middleware grpocli.rollout.vllm.auth.RequireKey` loads it, and it runs before all other code of the server.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})
BODY = b'{"error": {"message": "this server needs its key: Authorization: Bearer KEY", "code": 401}}'
HEADERS = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]


class RequireKey:
    """Answers 401 to any HTTP or websocket request without `Authorization: Bearer KEY`.

    key: by default the environment's VLLM_API_KEY. Raises RuntimeError without a key, so no server starts open.
    """

    def __init__(self, app: App, key: str | None = None) -> None:
        key = key or os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: refusing to serve without a key")
        self.app, self._digest = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": HEADERS})
            await send({"type": "http.response.body", "body": BODY})

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["path"] in OPEN_PATHS and scope["method"] == "GET"

    def _is_authorized(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(_digest(key.strip()), self._digest)


def _digest(key: bytes) -> bytes:
    """A digest, so that comparing takes the same time for keys of any length."""
    return hashlib.sha256(key).digest()


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": 401, "headers": HEADERS})
        await send({"type": "websocket.http.response.body", "body": BODY})
    else:
        await send({"type": "websocket.close", "code": 1008})  # before accept: servers answer HTTP 403
