"""The server's command line and environment, and what is said when it cannot start."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import server as vllm_server
from grpocli.rollout.vllm.log import failure_cause
from grpocli.rollout.vllm.options import Vllm
from grpocli.rollout.vllm.server import Spec, address, command, environment

SPEC = Spec("/models/m", "float32", seed=3, port=8001, max_model_len=256)


@pytest.fixture
def job(tmp_path: Path) -> EngineJob:
    return EngineJob("/models/m", "float32", 128, tmp_path / "run", seed=0)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def flags(options: Vllm, cpu: bool = True) -> dict[str, str | None]:
    words = command(SPEC, options, cpu)
    assert words[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return {name: value if found else None for name, found, value in (word.partition("=") for word in words[4:])}


def test_command_says_what_correctness_and_safety_rest_on() -> None:
    given = flags(Vllm())
    assert given["--host"] == "127.0.0.1"
    assert given["--port"] == "8001"
    assert given["--dtype"] == "float32"
    assert given["--max-model-len"] == "256"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm"
    assert given["--middleware"] == "grpocli.rollout.vllm.auth.RequireKey"
    assert json.loads(given["--weight-transfer-config"] or "") == {"backend": "shm"}
    assert "--enable-prefix-caching" in given
    assert not any("key" in name for name in given)


def test_command_on_cpu_and_gpu() -> None:
    on_cpu, on_gpu = flags(Vllm(), cpu=True), flags(Vllm(gpu_memory_utilization=0.5), cpu=False)
    assert "--enforce-eager" in on_cpu
    assert "--gpu-memory-utilization" not in on_cpu
    assert "--enforce-eager" not in on_gpu
    assert on_gpu["--gpu-memory-utilization"] == "0.5"
    assert "--enforce-eager" not in flags(Vllm(enforce_eager=False), cpu=True)


def test_other_options_pass_through() -> None:
    options = Vllm(vllm_args={"max_num_seqs": 8, "enable_log_requests": True, "async_scheduling": False, "a": {"b": 1}})
    given = flags(options)
    assert given["--max-num-seqs"] == "8"
    assert "--enable-log-requests" in given
    assert "--no-async-scheduling" in given
    assert given["--a"] == '{"b": 1}'


@pytest.mark.parametrize("name", ["middleware", "api-key", "logprobs_mode", "host"])
def test_options_that_are_ours_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.vllm_args\.{name}"):
        Vllm(vllm_args={name: "x"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_url", "127.0.0.1:8000"),
        ("port", 70000),
        ("start_timeout", 0),
        ("gpu_memory_utilization", 1.5),
        ("max_model_len", 0),
        ("replicas", 0),
    ],
)
def test_bad_values_name_their_key(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.{field}="):
        Vllm(**{field: value})


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    env = environment("the-key", Path("/dev/shm/x"), Vllm(cpu_kv_cache_gb=2))
    assert env["VLLM_API_KEY"] == "the-key"
    assert env["GRPOCLI_SHM_DIR"] == "/dev/shm/x"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_PLUGINS"] == "mine,grpocli"
    assert env["PATH"] == os.environ["PATH"]
    assert "MASTER_ADDR" not in env


def test_vllm_not_installed(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    monkeypatch.setattr(vllm_server, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'grpocli\[vllm\]'.*engine=transformers"), Vllm().launch(job):
        pass


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "check_installed", lambda: None)
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: True)


def test_busy_port(monkeypatch: pytest.MonkeyPatch, job: EngineJob, busy_port: int) -> None:
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=rf"engine\.port={busy_port}: .*in use"), Vllm(port=busy_port).launch(job):
        pass


def test_context_too_small_for_the_run(job: EngineJob) -> None:
    with (
        pytest.raises(ConfigError, match=r"engine\.max_model_len=100: .*128 tokens"),
        Vllm(max_model_len=100).launch(job),
    ):
        pass


def test_a_server_that_ends_while_it_starts_says_why(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    installed(monkeypatch)
    code = (
        "import sys; print('x'); sys.exit('(EngineCore pid=9) ERROR 11-21 [core.py:1] ValueError: too little memory')"
    )
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", code])
    with (
        pytest.raises(EngineError, match=r"exit code 1 .*ValueError: too little memory \(see .*vllm\.log\)"),
        Vllm().launch(job),
    ):
        pass


def test_a_server_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    installed(monkeypatch)
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    options = replace(Vllm(), start_timeout=1)
    with pytest.raises(EngineError, match=r"/health within 1 s \(engine\.start_timeout\)"), options.launch(job):
        pass


@pytest.mark.parametrize("tries", [2, 5])
def test_a_port_that_was_taken_meanwhile(monkeypatch: pytest.MonkeyPatch, job: EngineJob, tries: int) -> None:
    """A free port is chosen, then lost: another is tried, three times in all."""
    installed(monkeypatch)
    ports: list[int] = []

    def lose(spec: Spec, *_: object) -> list[str]:
        ports.append(spec.port)
        text = "OSError: [Errno 98] Address already in use" if len(ports) < tries else "ValueError: other"
        return [sys.executable, "-c", f"raise SystemExit({text!r})"]

    monkeypatch.setattr(vllm_server, "command", lose)
    with pytest.raises(EngineError, match="ValueError: other" if tries == 2 else "already in use"), Vllm().launch(job):
        pass
    assert len(ports) == min(tries, 3)


def test_failure_cause_skips_what_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: of an earlier run\n")
    since = log.stat().st_size
    assert failure_cause(log, since) == f": see {log}"
    with log.open("a") as file:
        file.write("(Worker pid=1) ERROR 11-21 08:29:52 [executor.py:1063] RuntimeError: Unsupported head_dim=16\n")
        file.write("(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert failure_cause(log, since) == f": RuntimeError: Unsupported head_dim=16 (see {log})"
    log.write_text("usage: x\napi_server.py: error: unrecognized arguments: --foo\n")
    assert failure_cause(log) == f": api_server.py: error: unrecognized arguments: --foo (see {log})"
    assert failure_cause(tmp_path / "missing") == ""


def test_address() -> None:
    assert address("127.0.0.1", 1) == "http://127.0.0.1:1"
    assert address("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert address("::1", 1) == "http://[::1]:1"


def test_any_option_of_vllm_is_an_override() -> None:
    """Without Hydra's `+`, and still typed elsewhere."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    node = ConfigStore.instance().repo["engine"]["vllm.yaml"].node  # type: ignore[index]
    config = OmegaConf.create({"engine": node})
    OmegaConf.set_struct(config, True)
    OmegaConf.update(config, "engine.vllm_args.max_num_seqs", 8)
    assert config.engine.vllm_args == {"max_num_seqs": 8}
    with pytest.raises(Exception, match="prt"):
        OmegaConf.update(config, "engine.prt", 8)
