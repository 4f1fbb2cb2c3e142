"""A server that answers byte by byte is given up at the deadline, and told as one that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from grpocli import http
from grpocli.errors import ConfigError, EngineError
from grpocli.rewards import judge
from grpocli.rewards.judge import Judge
from grpocli.rollout.vllm import client
from grpocli.rollout.vllm.client import ServerClient
from grpocli.rollout.vllm.server_files import Endpoint


class Slow(BaseHTTPRequestHandler):
    """A server that sends a byte now and then."""

    closed = threading.Event()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(10**12))
        self.end_headers()
        while not self.closed.wait(0.1):
            self.wfile.write(b" ")

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(judge, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setattr(client, "CHECK", 0.2)
    Slow.closed.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that give up
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Slow.closed.set()
        server.shutdown()


def ask_judge(url: str) -> None:
    Judge(base_url=url, model="m", prompt="{prompt}", retries=0, timeout=0.5).check([])


def ask_server(url: str) -> None:
    ServerClient(Endpoint(url, "key", ""), timeout=0.5).get("/health")


@pytest.mark.parametrize("ask", [ask_judge, ask_server])
def test_the_deadline_is_that_of_the_whole_answer(site: str, ask: Callable[[str], object]) -> None:
    began = time.monotonic()
    with pytest.raises((ConfigError, EngineError, httpx.HTTPError, TimeoutError)):
        ask(site)
    assert time.monotonic() - began < 10


def test_the_error_names_the_deadline(site: str) -> None:
    with pytest.raises(httpx.ReadTimeout, match=r"no whole answer within 0\.3 s"):
        http.fetch(site, 0.3)
