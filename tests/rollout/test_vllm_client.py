"""What a run is told when a server is slow, gone, broken or not the right one; against a stand-in server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from grpocli.data import Request, Sampling
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm.client import AT_ONCE, Client, Refused
from grpocli.rollout.vllm.endpoint import Endpoint, serve_file
from grpocli.rollout.vllm.engine import VllmEngine
from grpocli.rollout.vllm.given import find_endpoint, misfit
from grpocli.rollout.vllm.options import Vllm
from grpocli.rollout.vllm.request import spread

Answer = Callable[[str, Any], tuple[int, Any]]


class StandIn:
    """Answers by calling `answer(path, body)`, counts how many requests are under way."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, body: (200, {})
        self.now = self.most = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with outer.lock:
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
                status, answer = outer.answer(self.path, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with outer.lock:
                    outer.now -= 1
                self.send_response(status)
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
                return  # a client that gave up

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


@pytest.fixture
def client(stand_in: StandIn) -> Iterator[Client]:
    made = Client(Endpoint(stand_in.url, "key", "/nowhere"), timeout=5)
    yield made
    made.close()


def choice(tokens: list[int], reason: str = "length", **more: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5] * len(tokens)}
    return {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason} | more


def generate(client: Client, n: int, max_tokens: int = 2) -> Any:
    engine = VllmEngine(client, sync=None, stop=[1], version=0)  # type: ignore[arg-type]
    return engine.generate([Request([i], 1, seed=i) for i in range(n)], Sampling(max_tokens))


def test_order_is_that_of_the_requests_and_concurrency_is_bounded(stand_in: StandIn, client: Client) -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        time.sleep(0.05 if body["prompt"][0] % 2 else 0.01)
        return 200, {"choices": [choice([body["prompt"][0]] * 2)]}

    stand_in.answer = answer
    results = generate(client, 2 * AT_ONCE + 5)
    assert [group[0].token_ids[0] for group in results] == list(range(2 * AT_ONCE + 5))
    assert 4 < stand_in.most <= AT_ONCE


def test_choices_are_put_in_order(stand_in: StandIn, client: Client) -> None:
    stand_in.answer = lambda path, body: (200, {"choices": [{"index": 1, "a": "b"}, {"index": 0, "a": "a"}]})
    assert [c["a"] for c in client.complete([{}])[0]] == ["a", "b"]


def test_what_the_server_says_is_passed_on(stand_in: StandIn, client: Client) -> None:
    stand_in.answer = lambda path, body: (400, {"error": {"message": "prompt too long", "code": 400}})
    with pytest.raises(Refused, match=r"refused /v1/completions \(400\): prompt too long"):
        generate(client, 3)
    stand_in.answer = lambda path, body: (500, b"Internal Server Error\nmore")
    with pytest.raises(Refused, match=r"refused /resume \(500\): Internal Server Error$"):
        client.resume()


def test_the_first_failure_does_not_wait_for_the_others(stand_in: StandIn, client: Client) -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        if body["prompt"] == [1]:
            return 500, {"error": "broken"}
        time.sleep(4)
        return 200, {"choices": []}

    stand_in.answer = answer
    began = time.monotonic()
    with pytest.raises(Refused, match="broken"):
        generate(client, 3)
    assert time.monotonic() - began < 3


def test_deadline(stand_in: StandIn) -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        time.sleep(2)
        return 200, {}

    stand_in.answer = answer
    client = Client(Endpoint(stand_in.url, "key", "/nowhere"), timeout=0.2)
    for call in (client.pause, lambda: generate(client, 1)):
        with pytest.raises(EngineError, match=r"did not answer .* within 0\.2 s \(engine\.request_timeout\)"):
            call()
    client.close()


def test_a_server_that_is_gone(stand_in: StandIn, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("(EngineCore pid=1) ERROR [core.py:1] MemoryError: no memory\n")
    client = Client(Endpoint(stand_in.url, "key", "/nowhere", str(log)), timeout=5)
    stand_in.close()
    for call in (client.weight_version, lambda: generate(client, 1)):
        with pytest.raises(EngineError, match=r"is gone .*MemoryError: no memory \(see .*vllm\.log\)"):
            call()
    client.close()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "returned 0 completions of a prompt instead of 1"),
        ([choice([])], "broken completion: 0 tokens"),
        ([choice([4, 5], logprobs={"token_logprobs": [-1.0]})], "2 tokens, 1 log-probs"),
        ([choice([4, 5], reason="abort")], 'finish reason "abort"'),
        ([choice([4])], "after 1 of 2 tokens"),
    ],
)
def test_broken_completions_are_errors(stand_in: StandIn, client: Client, broken: list[Any], message: str) -> None:
    stand_in.answer = lambda path, body: (200, {"choices": broken})
    with pytest.raises(EngineError, match=message):
        generate(client, 1)


def test_temperature_that_vllm_would_change(client: Client) -> None:
    engine = VllmEngine(client, sync=None, stop=[1], version=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0\.001"):
        engine.generate([Request([1], 1, seed=0)], Sampling(2, temperature=0.001))


def test_seeds_of_neighbours_do_not_overlap() -> None:
    """The i-th of n completions gets seed + i on the server."""
    used = sorted(spread(seed) for seed in range(2000))
    assert min(b - a for a, b in pairwise(used)) > 10_000
    assert used[0] >= 0
    assert used[-1] < 2**62


def served(**changes: Any) -> dict[str, Any]:
    model = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 128, "model": "/none"}
    return {"model_config": model | changes, "weight_transfer_config": {"backend": "shm"}}


def test_misfit(tmp_path: Path) -> None:
    job = EngineJob("/other", "float32", 128, tmp_path, seed=0)
    assert misfit(served(), job) == ""
    assert "dtype=float32" in misfit(served(dtype="torch.bfloat16"), job)
    assert "max_model_len=128" in misfit(served(max_model_len=64), job)
    assert "not started for training" in misfit(served(logprobs_mode="raw_logprobs"), job)
    assert "not started for training" in misfit(served() | {"weight_transfer_config": None}, job)


def test_misfit_of_models(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for size, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": 90 + size, "architectures": ["X"]}))
    job = EngineJob(str(folders[0]), "float32", 128, tmp_path, seed=0)
    assert misfit(served(model=str(folders[0])), job) == ""
    assert "vocab_size=91, the run's 90" in misfit(served(model=str(folders[1])), job)


def given(stand_in: StandIn, tmp_path: Path, **options: Any) -> None:
    job = EngineJob("/other", "float32", 128, tmp_path / "run", seed=0)
    with Vllm(base_url=stand_in.url, **options).launch(job):
        pass


def test_given_server_without_rl_endpoints(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    stand_in.answer = lambda path, body: (200, b"") if path == "/health" else (404, {"detail": "Not Found"})
    with pytest.raises(ConfigError, match=r"no endpoints for reinforcement learning: .*grpocli vllm-serve"):
        given(stand_in, tmp_path)


def test_given_server_that_is_not_there(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    stand_in.close()
    with pytest.raises(ConfigError, match=r"engine\.base_url=http.*: no vLLM server answers there"):
        given(stand_in, tmp_path)


def test_where_the_key_of_a_given_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_CACHE", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    url = "http://localhost:8000"
    with pytest.raises(ConfigError, match=r"engine\.api_key_file=None: no key for http://localhost:8000"):
        find_endpoint(Vllm(), url)
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    assert find_endpoint(Vllm(), url) == Endpoint(url, "from-environment", "")
    Endpoint("http://127.0.0.1:8000", "from-serve", "/shm").save(serve_file(8000))
    assert find_endpoint(Vllm(), url) == Endpoint(url, "from-serve", "/shm")
    assert find_endpoint(Vllm(), "http://elsewhere:8000").api_key == "from-environment"
    bare = tmp_path / "key"
    bare.write_text("bare\n")
    assert find_endpoint(Vllm(api_key_file=str(bare)), url, "/mine") == Endpoint(url, "bare", "/mine")
    copied = Vllm(api_key_file=str(serve_file(8000)))
    assert find_endpoint(copied, "http://elsewhere:8000").api_key == "from-serve"
    with pytest.raises(ConfigError, match=r"engine\.api_key_file=/no/such: cannot be read"):
        find_endpoint(Vllm(api_key_file="/no/such"), url)


def test_a_given_server_is_not_trusted_before_a_sync(client: Client) -> None:
    engine = VllmEngine(client, sync=None, stop=[1], version=None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="sync before the first completion"):
        engine.generate([Request([1], 1, seed=0)], Sampling(2))
