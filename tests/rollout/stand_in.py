"""Stand-ins for a vLLM server: one with scripted answers, and a program."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpocli.rollout.vllm.client import ServerClient
from grpocli.rollout.vllm.server_files import Endpoint

PROGRAM = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, key, dies = sys.argv[1:]  # the request after the file `dies` appears ends it
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" or f"Bearer {key}" in str(self.headers) else 401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        if os.path.exists(dies):
            print("ValueError: the engine is dead", flush=True)
            os._exit(5)
    def log_message(self, *_): pass
print("starting up", flush=True)
HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
Answer = Callable[[str, Any], tuple[int, Any]]


class StandIn:
    """Answers with `answer(path, body)` and counts the requests in flight."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, body: (200, {})
        self.heard: list[tuple[str, str | None]] = []  # paths and the header with the key
        self.in_flight = self.max_in_flight = 0
        self.closed = threading.Event()  # a response that never comes waits for this event
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with outer.lock:
                    outer.in_flight += 1
                    outer.max_in_flight = max(outer.max_in_flight, outer.in_flight)
                    outer.heard.append((self.path.partition("?")[0], self.headers["authorization"]))
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
                status, answer = outer.answer(self.path, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with outer.lock:
                    outer.in_flight -= 1
                self.send_response(status)
                self.send_header("content-type", "text/plain" if isinstance(answer, bytes) else "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                return  # the client gave up

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


def choice(tokens: list[int], reason: str = "length", **more: Any) -> dict[str, Any]:
    """One completion as the server's JSON; each token has log-prob -0.5."""
    logprobs = {"content": [{"logprob": -0.5} for _ in tokens]}
    return {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason} | more


def clients_of(*servers: StandIn, timeout: float = 30) -> list[ServerClient]:
    return [ServerClient(Endpoint(server.url, "key", "/nowhere"), timeout) for server in servers]
