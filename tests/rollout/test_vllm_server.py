"""A server's command line and environment, and the errors of its start."""

from __future__ import annotations

import json
import socket
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.running import until
from rollout.stand_in import PROGRAM, StandIn

from grpocli.errors import ConfigError, EngineError
from grpocli.processes.guard import guarded
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import config as vllm_config
from grpocli.rollout.vllm import server as vllm_server
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.lora import lora_flags
from grpocli.rollout.vllm.server import ServerSpec, command, environment, serving, wait_healthy
from grpocli.rollout.vllm.server_files import Endpoint

SPEC = ServerSpec(EngineJob("/models/m", "float32", 256, Path(), seed=3), 8001, 256)


@pytest.fixture
def job(tmp_path: Path) -> EngineJob:
    return EngineJob("/models/m", "float32", 128, tmp_path / "run", seed=0)


def flags(options: Vllm, cpu: bool = True, spec: ServerSpec = SPEC) -> dict[str, str | None]:
    words = command(spec, options, cpu)
    assert words[:4] == [sys.executable, "-P", "-m", "grpocli.rollout.vllm.api_server"]
    return {name: value if found else None for name, found, value in (word.partition("=") for word in words[4:])}


def test_the_command_has_the_options_for_correctness_and_safety() -> None:
    given = flags(Vllm())
    wanted = {
        "--host": "127.0.0.1",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--middleware": "grpocli.rollout.vllm.api_server.RequireKey",
        "--weight-transfer-config": '{"backend": "shm"}',
    }
    assert {name: given[name] for name in wanted} == wanted
    assert not any("key" in name for name in given)


@pytest.mark.parametrize(
    ("changes", "cpu", "option", "value"),
    [
        ({}, True, "--no-enable-chunked-prefill", None),
        ({"dummy": True}, True, "--load-format", "dummy"),
        ({"revision": "v2"}, True, "--tokenizer-revision", "v2"),
        ({"shares_gpus": True}, False, "--gpu-memory-utilization", "0.4"),
        ({}, False, "--gpu-memory-utilization", "0.9"),
        ({"max_num_seqs": 129}, True, "--max-num-seqs", "129"),
        ({"max_num_seqs": 300}, False, "--max-num-seqs", "1024"),
        ({"dtype": "bfloat16"}, True, "--hf-overrides", '{"head_dtype": "model"}'),
        ({"dtype": "bfloat16", "head_dtype": "float32"}, True, "--hf-overrides", '{"head_dtype": "float32"}'),
        ({"lora_rank": 3}, True, "--max-lora-rank", "8"),
    ],
)
def test_a_server_has_the_settings_of_the_job(changes: dict[str, Any], cpu: bool, option: str, value: Any) -> None:
    given = flags(Vllm(), cpu, replace(SPEC, job=replace(SPEC.job, **changes)))
    assert given.get(option, "missing") == value
    assert changes == {} or option not in flags(Vllm(), cpu) or "gpu" in option


def test_each_option_is_given_once() -> None:
    spec = replace(SPEC, job=replace(SPEC.job, dtype="bfloat16"))
    words = command(spec, Vllm(vllm_args={"hf-overrides": {"rope_theta": 1.0}, "stop_words": ["a", "b"]}), cpu=True)
    [found] = [word.partition("=")[2] for word in words if word.startswith("--hf-overrides")]
    assert json.loads(found) == {"rope_theta": 1.0, "head_dtype": "model"}
    assert words[-3:] == ["--stop-words", "a", "b"]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"vllm_args": {"hf_overrides": {"head_dtype": "float32"}}}, "engine.vllm_args.hf_overrides"),
        ({"vllm_args": {"middleware": "x"}}, "engine.vllm_args.middleware: grpocli sets this itself"),
        ({"vllm_args": {"no-enable-lora": "x"}}, "engine.vllm_args.no-enable-lora: grpocli sets this itself"),
        ({"base_url": "127.0.0.1:8000"}, "engine.base_url="),
        ({"base_url": []}, "engine.base_url="),
        ({"base_url": ["http://a:1"], "api_key_file": ["a", "b"]}, "engine.api_key_file="),
        ({"base_url": "http://a:1", "replicas": 2}, "engine.replicas="),
        ({"gpu_memory_utilization": 1.5}, "engine.gpu_memory_utilization="),
    ],
)
def test_bad_values_name_their_key(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        Vllm(**fields)


def test_unsafe_environment_variables_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """These options would unpickle input or serve without a key."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    unsafe = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_USE_RUST_FRONTEND", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    kept = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_NUM_OF_RESERVED_CPU": "2"}
    for name, value in (dict.fromkeys(unsafe, "1") | kept | {"VLLM_HOST_IP": "0.0.0.0"}).items():
        monkeypatch.setenv(name, value)
    env = environment("the-key", Path("/dev/shm/x"), Path("/dev/shm/own"), Vllm())
    assert not env.keys() & set(unsafe)
    local = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert env.items() >= (kept | local).items()


def starts(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A process in place of a server, which counts as healthy."""
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: True)
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(vllm_server, "wait_healthy", lambda *_: None)


@pytest.mark.processes
def test_a_users_folder_for_weights_is_created_and_kept(monkeypatch, job: EngineJob, tmp_path: Path) -> None:
    starts(monkeypatch, "raise SystemExit('x')")
    folder = tmp_path / "shared" / "weights"
    spec = ServerSpec(replace(job, sync_folder=str(folder)), vllm_server.free_port(), None)
    with serving(spec, Vllm(), tmp_path / "log") as (endpoint, _):
        assert endpoint.shm_dir == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.is_dir()


@pytest.mark.processes
def test_a_new_server_gets_a_first_request_that_nobody_waits_for(monkeypatch, tmp_path: Path, job: EngineJob) -> None:
    starts(monkeypatch, "import time; time.sleep(60)")
    stand_in, asked = StandIn(), threading.Event()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.set()
        stand_in.closed.wait()
        return 500, {}

    stand_in.answer = answer
    monkeypatch.setattr(vllm_server, "address", lambda *_: stand_in.url)
    with serving(ServerSpec(job, vllm_server.free_port(), None), Vllm(), tmp_path / "log"):
        assert asked.wait(30)
    stand_in.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        ("ours", "import time; time.sleep(60)", None),
        ("theirs", "import time; time.sleep(60)", r"did not answer /health within 2 s"),
        ("ours", "raise SystemExit(7)", r"ended with exit code 7 while it started"),
    ],
    ids=["it is ours", "another has the port", "ours has ended"],
)
def test_a_healthy_server_must_be_alive_and_accept_the_key(
    tmp_path: Path, key: str, code: str, said: str | None
) -> None:
    """Two servers may have the same port, and `/health` needs no key."""
    port = vllm_server.free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        guarded([sys.executable, "-c", PROGRAM, str(port), "ours", "/nowhere"], name="other", grace=0.2),
        guarded([sys.executable, "-c", code], name="ours", grace=0.2) as process,
    ):
        until(lambda: listens(port) and not (said and "7" in said and process.poll() is None))
        if said is None:
            wait_healthy(process, Endpoint(url, key, ""), tmp_path / "log", timeout=10)
            return
        with pytest.raises(EngineError, match=said):
            wait_healthy(process, Endpoint(url, key, ""), tmp_path / "log", timeout=2)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_cause_of_a_failure_is_the_last_error_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: of an earlier run\n")
    ended = Endpoint("http://x", "k", "", str(log), log_from=log.stat().st_size)
    assert ended.cause() == f": see {log}"
    with log.open("a") as file:
        file.write("(Worker pid=1) ERROR 11-21 08:29:52 [executor.py:1063] RuntimeError: Unsupported head_dim=16\n")
        file.write("(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert ended.cause() == f": RuntimeError: Unsupported head_dim=16 (see {log})"
    assert not ended.refuses_an_option()
    assert replace(ended, log=str(tmp_path / "missing")).cause() == ""


@pytest.mark.parametrize(
    "said",
    [
        "api_server.py: error: unrecognized arguments: --max-num-seq=8",
        "ValidationError: 1 validation error for SchedulerConfig\nmax_num_seqs\n  Input should be at least 1",
    ],
)
def test_a_refused_option_is_told_from_other_causes(tmp_path: Path, said: str) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"usage: x\n(EngineCore pid=9) ERROR 11-21 08:29:52 [core.py:1063] {said}\n")
    ended = Endpoint("http://x", "k", "", str(log))
    assert " ".join(said.split()) in ended.cause()
    assert ended.refuses_an_option()


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.25.1", False), ("0.32.1.dev5+gabc", True), ("0.34.0", False), (vllm_config.UNKNOWN, True)],
)
def test_a_version_with_another_interface_for_weights_is_refused(monkeypatch, version: str, supported: bool) -> None:
    """Otherwise the first sync would fail, long after the start."""
    monkeypatch.setattr(vllm_config, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_config, "vllm_version", lambda: version)
    with nullcontext() if supported else pytest.raises(ConfigError, match=f"vLLM {version} is installed"):
        vllm_config.check_vllm("vllm")


@pytest.mark.parametrize(("rank", "dtype", "key"), [(513, "bfloat16", "lora.rank"), (8, "float32", "dtype")])
def test_ranks_and_dtypes_that_vllm_cannot_serve_are_refused(rank: int, dtype: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lora_flags(rank, dtype, cpu=False)
    assert caught.value.key == f"model.{key}"


@pytest.mark.processes
def test_a_server_that_does_not_answer_in_time_is_reported(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: True)
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    options = replace(Vllm(), start_timeout=1)
    with pytest.raises(EngineError, match=r"/health within 1 s \(engine\.start_timeout\)"), options.launch(job):
        pass
