"""Every address that a config names is read by one client: a size, and a deadline for the whole answer."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from grpocli import http
from grpocli.errors import ConfigError, EngineError
from grpocli.library_environments import openenv_environment as openenv
from grpocli.rewards import judge
from grpocli.rewards.judge import Judge
from grpocli.rollout.vllm import client, liveness
from grpocli.rollout.vllm.client import ServerClient
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.training import served_teacher
from grpocli.training.served_teacher import ServedTeacher

NESTED = b"[" * 200_000


class Bad(BaseHTTPRequestHandler):
    """A server whose first word of the path says what is wrong with its answers."""

    closed = threading.Event()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        what = self.path.split("/")[1]
        body = {"compressed": gzip.compress(b" " * 10**7), "nested": NESTED}.get(what)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if what == "compressed":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body) if body else 10**12))
        self.end_headers()
        if body:
            self.wfile.write(body)
        while not body and not self.closed.wait(0.1 if what == "slow" else 0):
            self.wfile.write(b" " if what == "slow" else b" " * 10**6)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for module in (judge, openenv):
        for name in ("LARGEST_RESPONSE", "LARGEST_SCHEMA"):
            monkeypatch.setattr(module, name, 10**6, raising=False)
    monkeypatch.setattr(client, "LARGEST", 10**6)
    monkeypatch.setattr(liveness, "LARGEST", 10**6)
    monkeypatch.setattr(served_teacher, "LARGEST_ANSWER", 10**6)
    monkeypatch.setattr(judge, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setattr(openenv, "SCHEMA_SECONDS", 0.5)
    monkeypatch.setattr(liveness, "CHECK_TIMEOUT", 0.2)
    monkeypatch.setattr(client, "HEARTBEAT", 0.2)
    Bad.closed.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Bad) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that give up
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Bad.closed.set()
        server.shutdown()


def ask_judge(url: str) -> None:
    Judge(base_url=url, model="m", prompt="{prompt}", retries=0, timeout=0.5).check([])


def ask_server(url: str) -> None:
    ServerClient(Endpoint(url, "key", ""), timeout=0.5).get("/health")


def ask_teacher(url: str) -> None:
    teacher = ServedTeacher(url, (), "algorithm.kl.base_url", None, 0.5)
    if problem := asyncio.run(served_teacher._problem(teacher, Tokens(), 1)):
        raise ConfigError(problem)


class Tokens:
    eos_token_id = 1

    def __call__(self, *_: object, **__: object) -> Tokens:
        return self

    input_ids = (1, 2)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}


@pytest.mark.parametrize("what", ["endless", "slow", "compressed", "nested"])
@pytest.mark.parametrize("ask", [ask_judge, openenv.action_schema, ask_server, ask_teacher])
def test_a_bad_answer_ends_soon_and_with_a_reason(site: str, ask: Callable[[str], object], what: str) -> None:
    began = time.monotonic()
    refusals = (ConfigError, EngineError, httpx.HTTPError, ValueError)
    if (ask, what) == (ask_judge, "nested"):  # any answer shows that the judge is there
        return ask_judge(f"{site}/{what}")
    with pytest.raises(refusals):
        ask(f"{site}/{what}")
    assert time.monotonic() - began < 10


def test_the_size_and_the_deadline_are_those_of_the_whole_answer(site: str) -> None:
    with pytest.raises(http.TooLong, match="longer than 1,000 bytes"):
        http.fetch(f"{site}/endless", 1000, 60)
    with pytest.raises(httpx.ReadTimeout, match=r"no whole answer within 0\.3 s"):
        http.fetch(f"{site}/slow", 1000, 0.3)
    assert len(http.fetch(f"{site}/nested", len(NESTED), 60).content) == len(NESTED)
