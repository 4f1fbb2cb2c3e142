"""vLLM's API server whose processes die with their parents: `python -m` this module, with vLLM's options.

vLLM's engine and worker processes would outlive a server killed by SIGKILL, with the model in memory. Spawned processes
import this module as `__mp_main__` before any module of vLLM, and forked ones run the hook.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import runpy
import secrets
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partialmethod
from multiprocessing import process, shared_memory
from pathlib import Path
from typing import Any, TypeAlias

from grpocli.processes.reaper import die_with_parent
from grpocli.rollout.vllm.server_files import shared_memory_name

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PRIVATE_FOLDER_VARIABLE = "GRPOCLI_SERVER_FOLDER"
"""The server's private folder. Its shared memory is named after it, so that the next start can remove leftovers."""
PARENT_VARIABLE = "GRPOCLI_SERVER_PROCESS"
"""The process id of the parent."""
KEY_VARIABLE = "VLLM_API_KEY"
BODY = b'{"error": {"message": "this server needs its key: Authorization: Bearer KEY", "code": 401}}'
HEADERS = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]


class RequireKey:
    """ASGI middleware: answers 401 to any HTTP or websocket request without `Authorization: Bearer KEY`.

    vLLM's own check covers only some prefixes; with its RL endpoints enabled, any client could change weights or call
    the workers. Only `GET /health` is open.

    key: by default the environment's VLLM_API_KEY. Raises RuntimeError without a key, so no server starts open.
    """

    def __init__(self, app: App, key: str | None = None) -> None:
        key = key or os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: refusing to serve without a key")
        self.app, self._digest = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and scope["path"] == "/health" and scope["method"] == "GET"
        if scope["type"] == "lifespan" or is_open or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008})  # before accept: servers answer HTTP 403
        else:
            await send({"type": "http.response.start", "status": 401, "headers": HEADERS})
            await send({"type": "http.response.body", "body": BODY})

    def _is_authorized(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(_digest(key.strip()), self._digest)


def _digest(key: bytes) -> bytes:
    """A digest, so that comparing takes the same time for keys of any length."""
    return hashlib.sha256(key).digest()


def tie() -> None:
    """Die with the parent, also if it died before this call."""
    die_with_parent()
    if os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def name_shared_memory() -> None:
    """Name vLLM's shared memory and semaphores after the server's folder, for which Python has no public API."""
    name = shared_memory_name(Path(os.environ[PRIVATE_FOLDER_VARIABLE]))
    shared_memory._SHM_NAME_PREFIX = f"/{name}_"  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{name}"  # type: ignore[attr-defined]


if __name__ in ("__main__", "__mp_main__"):
    if __name__ == "__mp_main__":
        tie()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.register_at_fork(after_in_child=tie)
    name_shared_memory()
    if __name__ == "__main__":
        # a shortened name would be another option than the one that grpocli checked
        whole_names = partialmethod(argparse.ArgumentParser.__init__, allow_abbrev=False)
        argparse.ArgumentParser.__init__ = whole_names  # type: ignore[method-assign, assignment]
        # not with alter_sys: spawned processes would import vLLM's module instead of this one
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
