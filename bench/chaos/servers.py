"""Servers that trials share, and a proxy that spoils their answers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chaos.trial import PromiseBroken
from chaos.workspace import PATIENCE, START, Shared, Tree, Workspace, require_module

from grpocli.rollout.vllm.client import GENERATE
from grpocli.rollout.vllm.server_files import Endpoint

MODEL = ["model.warm_start_steps=20", "engine.max_model_len=64"]
STAND_IN, REAL = "a stand-in", "vLLM"
_running: dict[str, Server] = {}
_starting = threading.Lock()


@dataclass
class Server:
    """A running server. A run holds its lock, since a server belongs to one run at a time."""

    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        return int(self.endpoint.url.rpartition(":")[2])


def server(workspace: Workspace, kind: str) -> Server:
    """The server of this kind, which the first trial starts."""
    require_module("vllm" if kind == REAL else "uvicorn")
    with _starting:
        found = _running.get(kind)
        if found is None or found.process.poll() is not None:
            found = _running[kind] = _start(workspace.shared, kind)
    return found


def _start(shared: Shared, kind: str) -> Server:
    command = ["-m", "grpocli", "vllm-serve", "port=0", *MODEL] if kind == REAL else ["-m", "chaos.stand_in", *MODEL]
    log = shared.folder / f"server_{len(list(shared.folder.glob('server_*')))}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], env=shared.environment, cwd=shared.folder, stdout=file, stderr=file
        )
    tree = Tree(process.pid)

    def close() -> None:
        tree.look()
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        tree.end()
        process.wait()
        _running.clear()

    shared.at_end(close)
    deadline = time.monotonic() + START
    while not _listens(said := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise PromiseBroken(f"{kind} did not start: {said[-500:]}")
        time.sleep(0.1)
    return Server(process, Endpoint.load(serve_file(shared, _port(said))))


def _port(said: str) -> int:
    return int(said.partition("serves at http://127.0.0.1:")[2].split()[0])


def _listens(said: str) -> bool:
    """Whether the server has printed its address and accepts connections."""
    if "serves at http" not in said:
        return False
    try:
        socket.create_connection(("127.0.0.1", _port(said)), timeout=5).close()
    except OSError:
        return False
    return True


def serve_file(shared: Shared, port: int) -> Path:
    """The file in which commands find the key of the server at this port."""
    return Path(shared.environment["GRPOCLI_CACHE"]) / "serve" / f"{port}.json"


Answer = tuple[int, bytes]


class BrokenConnection(Exception):
    """The proxy sends these bytes and closes the connection."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data


class Proxy:
    """Forwards requests, and lets `spoil` answer those to `path`.

    spoil: receives the number of the request and a function that asks the server; returns the answer or raises
        BrokenConnection. count: requests to `path` so far; probes of weights do not count.
    """

    def __init__(self, upstream: Server, path: str, spoil: Callable[[int, Callable[[], Answer]], Answer]) -> None:
        self.count = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                kind: str | None = "application/json"

                def ask() -> Answer:
                    nonlocal kind
                    connection = HTTPConnection("127.0.0.1", upstream.port, timeout=PATIENCE)
                    headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                    connection.request(self.command, self.path, body, headers)
                    response = connection.getresponse()
                    kind = response.headers.get("content-type")
                    data = response.read()
                    connection.close()
                    return response.status, data

                self.close_connection = True
                try:
                    if self.path.partition("?")[0] == path and outer.is_counted(path, body):
                        with outer.lock:
                            number = outer.count
                            outer.count += 1
                        status, data = spoil(number, ask)
                    else:
                        status, data = ask()
                except BrokenConnection as broken:
                    self.wfile.write(broken.data)
                    return
                except (OSError, HTTPException):
                    return  # the server closed the connection
                self.send_response(status)
                if kind is not None:  # vLLM's empty answers have none
                    self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                return

        class Listener(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                return  # a client that gave up

        self.http = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def is_counted(self, path: str, body: bytes) -> bool:
        if path != GENERATE:
            return True
        with suppress(ValueError):
            request: Any = json.loads(body)
            return "seed" in request.get("sampling_params", {}) and not request["sampling_params"].get("ignore_eos")
        return False

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def behind_proxy(
    workspace: Workspace, upstream: Server, path: str, spoil: Callable[[int, Callable[[], Answer]], Answer]
) -> Iterator[Proxy]:
    """A proxy with the server's key. No other run uses the server meanwhile."""
    with upstream.lock:
        proxy = Proxy(upstream, path, spoil)
        record = serve_file(workspace.shared, int(proxy.url.rpartition(":")[2]))
        Endpoint(proxy.url, upstream.endpoint.api_key, upstream.endpoint.shm_dir).save(record)
        try:
            yield proxy
        finally:
            record.unlink(missing_ok=True)
            proxy.close()
