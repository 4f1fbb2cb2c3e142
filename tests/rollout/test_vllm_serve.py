"""`grpocli vllm-serve` without a server: its keys, output and errors."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cli.running import until
from rollout.stand_in import PROGRAM
from rollout.vllm_tiny import build_model

from grpocli.composition.compose import compose
from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.vllm import server as vllm_server
from grpocli.rollout.vllm.config import Serve
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.external import build_server_config, serve
from grpocli.rollout.vllm.server import ServerSpec
from grpocli.rollout.vllm.server_files import Endpoint, serve_file


def composed(*overrides: str) -> Serve:
    return build_server_config(compose(list(overrides), "vllm_serve"))


def test_it_serves_the_model_and_the_engine_of_a_run(tmp_path: Path) -> None:
    made = composed("model.lora.rank=4", "engine.max_model_len=99", "sync.folder=/x", "sync=shm")
    assert made.engine == Vllm(max_model_len=99)
    job = made.job(str(build_model(tmp_path / "m", tied=True)), "float32")
    assert (job.transport, job.sync_folder, job.lora_rank, job.max_tokens) == ("shm", "/x", 4, 99)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("engine.tensor_parallel=0", "engine.tensor_parallel"),
        ("port=70000", "port"),
        ("engine.base_url=[http://a:1,http://b:1]", "engine.base_url"),
        ("engine=transformers", "engine"),
    ],
)
def test_wrong_overrides_are_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(override)
    assert caught.value.key == key


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path) -> Serve:
    """A process in place of vLLM; the request after the file `die` appears ends it."""

    def command(spec: ServerSpec, *_: object) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(spec.port), "", str(tmp_path / "die")]

    monkeypatch.setattr(vllm_server, "command", command)
    return composed("engine.start_timeout=30", f"port={vllm_server.free_port()}")


def when_it_serves(config: Serve, act: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        until(serve_file(config.port).exists, 30)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_only_its_log_is_left(fake: Serve, tmp_path: Path, capsys, number: signal.Signals) -> None:
    left: list[tuple[Endpoint, int]] = []

    def act() -> None:
        left.append((Endpoint.load(serve_file(fake.port)), serve_file(fake.port).stat().st_mode & 0o777))
        time.sleep(0.3)
        signal.raise_signal(number)

    thread = when_it_serves(fake, act)
    assert serve(fake, str(build_model(tmp_path / "m", tied=True)), "float32") == 0
    thread.join()
    said = capsys.readouterr().out
    assert "starting up" not in said, "vLLM's log belongs in its file"
    assert str(serve_file(fake.port).with_suffix(".log")) in said
    assert f"engine.base_url=http://127.0.0.1:{fake.port}" in said
    ((endpoint, mode),) = left
    assert endpoint.api_key not in said
    assert mode == 0o600
    assert [path.suffix for path in serve_file(fake.port).parent.iterdir()] == [".log"]
    assert not Path(endpoint.shm_dir).exists()


@pytest.mark.processes
def test_a_dead_servers_cause_is_reported(fake: Serve, tmp_path: Path) -> None:
    def act() -> None:
        (tmp_path / "die").touch()
        with contextlib.suppress(httpx.HTTPError):  # the request kills the server
            httpx.get(f"http://127.0.0.1:{fake.port}/health", trust_env=False)

    thread = when_it_serves(fake, act)
    with pytest.raises(EngineError, match=r"ended by itself with exit code 5: ValueError: the engine is dead"):
        serve(fake, str(build_model(tmp_path / "m", tied=True)), "float32")
    thread.join()
    assert not serve_file(fake.port).exists()
    assert "the engine is dead" in serve_file(fake.port).with_suffix(".log").read_text(), "the message names this file"


@pytest.mark.processes
def test_a_busy_port_is_reported_and_its_server_keeps_running(fake: Serve, tmp_path: Path) -> None:
    """The server on that port keeps its key and its log."""
    model, passed = str(build_model(tmp_path / "m", tied=True)), list[bool]()
    said = rf"^port={fake.port}: cannot listen there on 127\.0\.0\.1 \(.*in use"

    def act() -> None:
        before = serve_file(fake.port).read_text()
        try:
            with pytest.raises(ConfigError, match=said):
                serve(fake, model, "float32")
            assert serve_file(fake.port).read_text() == before
            assert "starting up" in serve_file(fake.port).with_suffix(".log").read_text()
            passed.append(True)
        finally:
            signal.raise_signal(signal.SIGINT)

    thread = when_it_serves(fake, act)
    assert serve(fake, model, "float32") == 0
    thread.join()
    assert passed == [True]
