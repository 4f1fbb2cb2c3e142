"""Requests without the key are refused, whatever their path, method and headers, and the server continues."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from chaos.servers import REAL, STAND_IN, Server, server
from chaos.trial import Kind, require
from chaos.workspace import Workspace

REQUESTS = 100  # in a trial
PATHS = [
    *("/weight_info", "/server_info", "/update_weights", "/start_weight_update", "/finish_weight_update", "/pause"),
    *("/resume", "/init_weight_transfer_engine", "/update_weight_version", "/inference/v1/generate", "/v1/models"),
    *("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/metrics", "/metrics/", "/docs", "/version"),
    *("/openapi.json", "/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/get_world_size", "/", "*"),
    *("/abort_requests", "/v1/realtime", "/is_paused", "/tokenize", "/detokenize", "/invocations", "/ping"),
]
SPELLINGS = [
    *("{}", "{}/", "/{}", "/health/..{}", "/health{}", "{}?key=x", "{}#/health", "{};/health", "{}%00", "/.{}"),
    *("/%68ealth/..{}", "{}/../health", "/health%2f..{}", "{}?path=/health", "/HEALTH{}", "http://127.0.0.1{}"),
    *("\\health{}", "/health/../{}", "/health%20{}", "{}%2f", "/health\t{}"),
]
METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "get", "POST", "X", "PROPFIND"]
HEADERS = [
    *("", "Authorization: Bearer", "Authorization: Bearer x", "Authorization: Basic eDp4", "Authorization: ", "Key: x"),
    *("X-Forwarded-For: 127.0.0.1", "X-Original-URL: /health", "X-Rewrite-URL: /health", "Cookie: key=x"),
    *("Authorization: Bearer null\r\nAuthorization: Bearer x", "X-HTTP-Method-Override: GET", "Host: /health"),
    *("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13",),
    *("Authorization: Bearer \x80\xff", "Transfer-Encoding: identity", "Expect: 100-continue"),
]
BODIES = [b"", b"{}", b'{"new_version": "stolen"}', b'{"update_info": {"file": "x"}}', b"[" * 2000, b"\xff" * 100]


@dataclass(frozen=True, slots=True)
class Keyless:
    """Random requests to a kind of server."""

    kind: str
    seed: int
    attacks = REQUESTS

    def __str__(self) -> str:
        return f"{self.kind}: {REQUESTS} requests without the key"

    def execute(self, workspace: Workspace) -> None:
        found = server(workspace, self.kind)
        random = Random(self.seed)
        with found.lock:
            before = weight_version(found)
            for _ in range(REQUESTS):
                sent = request(random)
                status = answer(found, sent)
                require(status not in range(200, 400), f"it answered {status} to {sent!r}")
            require(weight_version(found) == before, "the weights have another version")
            require(
                answer(found, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") == 200,
                "the server is dead",
            )


def request(random: Random) -> bytes:
    """A random request; never GET /health in any encoding."""
    path = random.choice(SPELLINGS).format(random.choice(PATHS))
    body = random.choice(BODIES)
    header = random.choice(HEADERS)
    lines = [f"{random.choice(METHODS)} {path} HTTP/1.1", "Host: x", header, f"Content-Length: {len(body)}"]
    head = "\r\n".join([line for line in lines if line] + ["Connection: close", "", ""])
    return head.encode("latin-1") + body


def answer(found: Server, sent: bytes) -> int | None:
    """The status; None if the server closed the connection."""
    try:
        with socket.create_connection(("127.0.0.1", found.port), timeout=30) as connection:
            connection.sendall(sent)
            first = connection.makefile("rb").readline()
    except TimeoutError:
        return 200  # a request that waits for the engine has passed the check
    except OSError:
        return None
    return int(first.split()[1]) if first.startswith(b"HTTP/") else None


def weight_version(found: Server) -> str:
    """The weight version, from a request with the key."""
    key = found.endpoint.api_key
    with socket.create_connection(("127.0.0.1", found.port), timeout=60) as connection:
        connection.sendall(
            f"GET /weight_info HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n".encode()
        )
        data = connection.makefile("rb").read()
    body = data.partition(b"\r\n\r\n")[2]
    return str(json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["weight_version"])


def draw(random: Random, count: int) -> Sequence[Keyless]:
    return [Keyless(STAND_IN if i % 4 == 3 else REAL, random.randrange(2**32)) for i in range(count)]


KIND = Kind("keyless", 2000 // REQUESTS, draw)
