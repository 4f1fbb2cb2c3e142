"""`grpocli vllm-serve` without a server: its keys, help, output and errors."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpocli.composition.compose import compose
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.sync_config import AutoSyncConfig
from grpocli.rollout.vllm import server as vllm_server
from grpocli.rollout.vllm.config import SHORT, Serve
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.external import build_server_config, serve
from grpocli.rollout.vllm.server import ServerSpec
from grpocli.rollout.vllm.server_files import Endpoint, fresh_log, printed_log, serve_file

VALUES: dict[str, Any] = {
    "tensor_parallel": 2,
    "data_parallel": 3,
    "max_model_len": 99,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "quantization": "fp8",
    "speculative": {"method": "ngram", "num_speculative_tokens": 4},
    "cpu_kv_cache_gb": 7,
}


def composed(*overrides: str) -> Serve:
    return build_server_config(compose(list(overrides), "vllm_serve"))


def written(value: Any) -> str:
    return "{" + ",".join(f"{k}:{v}" for k, v in value.items()) + "}" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("prefix", ["", "engine."])
@pytest.mark.parametrize("name", SHORT)
def test_a_key_may_have_the_prefix_engine(name: str, prefix: str) -> None:
    options = composed(f"{prefix}{name}={written(VALUES[name])}").options()
    assert options == replace(Vllm(), **{name: VALUES[name]})


def test_defaults_equal_those_of_the_engine_and_the_model() -> None:
    made = composed()
    assert made.options() == Vllm()
    assert made.dtype == "auto"
    job = made.job("/m", "float32")
    assert (job.transport, job.sync_folder, job.lora_rank, job.seed) == ("shm", None, 0, 0)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("tensor_parallel=0", "tensor_parallel"),
        ("engine.tensor_parallel=0", "engine.tensor_parallel"),
        ("port=70000", "port"),
        ("dtype=float8", "dtype"),
        ("lora_rank=-1", "lora_rank"),
        ("engine.replicas=2", "engine.replicas"),
        ("engine.base_url=[http://a:1,http://b:1]", "engine.base_url"),
        ("engine=transformers", "engine"),
    ],
)
def test_wrong_overrides_are_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(override)
    assert caught.value.key == key


FAKE = """
import os, sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answer = b'{"vllm_config": {"model_config": {"max_model_len": 128}}, "version": "0.1"}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        if os.path.exists(sys.argv[2]):
            print("ValueError: the engine is dead", flush=True)
            os._exit(5)
    def log_message(self, *_): pass
print("starting up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path) -> Serve:
    """A process in place of vLLM; the request after the file `die` appears ends it."""

    def command(spec: ServerSpec, *_: object) -> list[str]:
        return [sys.executable, "-c", FAKE, str(spec.port), str(tmp_path / "die")]

    monkeypatch.setattr(vllm_server, "command", command)
    return Serve(model=None, engine=Vllm(start_timeout=30), sync=AutoSyncConfig(), port=vllm_server.free_port())


def when_it_serves(config: Serve, act: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 30
        while not serve_file(config.port).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(
    fake: Serve, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    left: list[Endpoint] = []

    def act() -> None:
        left.append(Endpoint.load(serve_file(fake.port)))
        left_mode.append(serve_file(fake.port).stat().st_mode & 0o777)
        time.sleep(0.3)
        signal.raise_signal(number)

    left_mode: list[int] = []
    thread = when_it_serves(fake, act)
    assert serve(fake, "/m", "float32") == 0
    thread.join()
    said = capsys.readouterr().out
    assert "starting up" not in said, "vLLM's log belongs in its file"
    assert f"{serve_file(fake.port).with_suffix('.log')} (verbose=true prints it)" in said
    assert f"engine.base_url=http://127.0.0.1:{fake.port}" in said
    assert left[0].api_key not in said
    assert left_mode == [0o600]
    assert list(serve_file(fake.port).parent.iterdir()) == []
    assert not Path(left[0].shm_dir).exists()


@pytest.mark.processes
def test_a_dead_servers_cause_is_reported(fake: Serve, tmp_path: Path) -> None:
    def act() -> None:
        (tmp_path / "die").touch()
        with contextlib.suppress(httpx.HTTPError):  # the request kills the server
            httpx.get(f"http://127.0.0.1:{fake.port}/health", trust_env=False)

    thread = when_it_serves(fake, act)
    with pytest.raises(EngineError, match=r"ended by itself with exit code 5: ValueError: the engine is dead"):
        serve(fake, "/m", "float32")
    thread.join()
    assert not serve_file(fake.port).exists()
    assert "the engine is dead" in serve_file(fake.port).with_suffix(".log").read_text(), "the message names this file"


@pytest.mark.processes
def test_a_busy_port_is_reported_and_its_server_keeps_running(fake: Serve, tmp_path: Path) -> None:
    """The server on that port keeps its key and its log."""

    def act() -> None:
        before = serve_file(fake.port).read_text()
        try:
            with pytest.raises(
                ConfigError, match=rf"^port={fake.port}: cannot listen there on 127\.0\.0\.1 \(.*in use"
            ):
                serve(fake, "/m", "float32")
            assert serve_file(fake.port).read_text() == before
            assert "starting up" in serve_file(fake.port).with_suffix(".log").read_text()
            passed.append(True)
        finally:
            signal.raise_signal(signal.SIGINT)

    passed: list[bool] = []
    thread = when_it_serves(fake, act)
    assert serve(fake, "/m", "float32") == 0
    thread.join()
    assert passed == [True]


@pytest.mark.processes
def test_the_whole_log_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "serve" / "1.log"
    log.parent.mkdir()
    log.write_text("of an earlier server\n")
    with fresh_log(log), printed_log(log):
        assert log.stat().st_mode & 0o777 == 0o600
        with log.open("a") as file:
            file.write("first\n")
        time.sleep(0.5)
        assert capfd.readouterr().out == "first\n"
    assert not log.exists()
