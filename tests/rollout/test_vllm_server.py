"""A server's command line and environment, and the errors of its start."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout.stand_in import StandIn

from grpocli.errors import ConfigError, EngineError
from grpocli.processes.guard import guarded
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import config as vllm_config
from grpocli.rollout.vllm import server as vllm_server
from grpocli.rollout.vllm.client import GENERATE
from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
from grpocli.rollout.vllm.plugin import BACKENDS
from grpocli.rollout.vllm.server import FIRST_REQUEST, ServerSpec, command, environment, serving, wait_healthy
from grpocli.rollout.vllm.server_files import Endpoint, failure_cause

SPEC = ServerSpec(EngineJob("/models/m", "float32", 256, Path(), seed=3), 8001, 256)


@pytest.fixture
def job(tmp_path: Path) -> EngineJob:
    return EngineJob("/models/m", "float32", 128, tmp_path / "run", seed=0)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def flags(options: Vllm, cpu: bool = True, spec: ServerSpec = SPEC) -> dict[str, str | None]:
    words = command(spec, options, cpu)
    assert words[:4] == [sys.executable, "-P", "-m", "grpocli.rollout.vllm.api_server"]
    return {name: value if found else None for name, found, value in (word.partition("=") for word in words[4:])}


def test_the_command_has_the_options_for_correctness_and_safety() -> None:
    given = flags(Vllm())
    assert given["--host"] == "127.0.0.1"
    assert given["--port"] == "8001"
    assert given["--dtype"] == "float32"
    assert given["--max-model-len"] == "256"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm"
    assert given["--middleware"] == "grpocli.rollout.vllm.api_server.RequireKey"
    assert json.loads(given["--weight-transfer-config"] or "") == {"backend": "shm"}
    assert "--enable-prefix-caching" in given
    assert given["--scheduling-policy"] == "priority"
    assert not any("key" in name for name in given)


def test_the_command_differs_between_cpu_and_gpu() -> None:
    on_cpu, on_gpu = flags(Vllm(), cpu=True), flags(Vllm(gpu_memory_utilization=0.5), cpu=False)
    assert "--enforce-eager" in on_cpu
    assert "--gpu-memory-utilization" not in on_cpu
    assert "--enforce-eager" not in on_gpu
    assert "--no-enable-chunked-prefill" in on_cpu
    assert not any("chunked" in name for name in on_gpu)
    assert on_gpu["--gpu-memory-utilization"] == "0.5"
    assert "--enforce-eager" not in flags(Vllm(enforce_eager=False), cpu=True)


@pytest.mark.parametrize(
    ("given", "shared", "share"), [(None, False, "0.9"), (None, True, "0.4"), (0.7, False, "0.7"), (0.7, True, "0.7")]
)
def test_vllm_takes_less_of_a_gpu_that_also_trains(given: float | None, shared: bool, share: str) -> None:
    spec = replace(SPEC, job=replace(SPEC.job, shares_gpus=shared))
    assert flags(Vllm(gpu_memory_utilization=given), cpu=False, spec=spec)["--gpu-memory-utilization"] == share


@pytest.mark.parametrize(
    ("most", "cpu", "limit"),
    [(128, True, None), (129, True, "129"), (256, False, None), (300, False, "1024"), (2000, False, "2000")],
)
def test_a_large_group_is_one_request(most: int, cpu: bool, limit: str | None) -> None:
    assert flags(Vllm(), cpu, replace(SPEC, job=replace(SPEC.job, max_num_seqs=most))).get("--max-num-seqs") == limit


def test_keys_with_other_names_in_vllm_are_translated() -> None:
    given = flags(Vllm(tensor_parallel=2, data_parallel=3, quantization="fp8", speculative={"method": "ngram"}))
    assert given["--tensor-parallel-size"] == "2"
    assert given["--data-parallel-size"] == "3"
    assert given["--quantization"] == "fp8"
    assert json.loads(given["--speculative-config"] or "") == {"method": "ngram"}
    plain = flags(Vllm())
    assert not {"--data-parallel-size", "--quantization", "--speculative-config"} & set(plain)


def test_a_server_has_the_settings_of_the_job(job: EngineJob) -> None:
    special = replace(job, transport="ipc", revision="v2", trust_remote_code=True, lora_rank=8, sync_folder="/shared")
    spec = ServerSpec(special, 8001, 256, port_key="port")
    given = flags(Vllm(), spec=spec)
    assert (given["--model"], given["--dtype"], given["--max-model-len"]) == ("/models/m", "float32", "256")
    assert json.loads(given["--weight-transfer-config"] or "") == {"backend": BACKENDS["ipc"]}
    assert given["--revision"] == given["--tokenizer-revision"] == "v2"
    assert "--trust-remote-code" in given
    assert "--enable-lora" in given
    assert (spec.job.sync_folder, spec.port_key, spec.host) == ("/shared", "port", "127.0.0.1")
    assert flags(Vllm(), spec=ServerSpec(replace(job, dummy=True), 1))["--load-format"] == "dummy"
    assert not {"--revision", "--trust-remote-code", "--enable-lora", "--load-format"} & set(
        flags(Vllm(), spec=ServerSpec(job, 1, None))
    )


@pytest.mark.parametrize(
    ("dtype", "head_dtype", "expected"),
    [
        ("float32", None, {"rope_theta": 1.0}),
        ("bfloat16", None, {"rope_theta": 1.0, "head_dtype": "model"}),
        ("bfloat16", "float32", {"rope_theta": 1.0, "head_dtype": "float32"}),
    ],
)
def test_the_output_head_has_the_dtype_of_the_job(dtype: str, head_dtype: str | None, expected: dict[str, Any]) -> None:
    """The user's entries of the model's config stay, and each option is given once."""
    spec = replace(SPEC, job=replace(SPEC.job, dtype=dtype, head_dtype=head_dtype))
    words = command(spec, Vllm(vllm_args={"hf-overrides": {"rope_theta": 1.0}}), cpu=True)
    [found] = [word.partition("=")[2] for word in words if word.startswith("--hf-overrides")]
    assert json.loads(found) == expected
    plain = flags(Vllm(), spec=spec).get("--hf-overrides")
    assert (None if plain is None else json.loads(plain)) == (
        None if dtype == "float32" else {"head_dtype": expected["head_dtype"]}
    )


@pytest.mark.parametrize("part", [Vllm, VllmColocate])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"head_dtype": "float32"}, r"\.hf_overrides\.head_dtype: set model\.head_dtype instead"),
        ("x", r"\.hf_overrides=x: must be a dictionary of entries of the model's config"),
    ],
)
def test_vllms_own_head_dtype_is_refused(part: type, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.vllm_args{message}"):
        part(vllm_args={"hf_overrides": value})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *((name, "grpocli sets this itself") for name in ("middleware", "api-key", "logprobs_mode", "host", "uds")),
        *((name, "grpocli sets this itself") for name in ("enable_scale_out", "no-enable-lora", "config", "grpc")),
        ("max_model_len", r"set engine\.max_model_len"),
        ("data-parallel-size", r"set engine\.data_parallel"),
        ("tensor_parallel_size", r"set engine\.tensor_parallel"),
        ("speculative_config", r"set engine\.speculative"),
        ("quantization", r"set engine\.quantization"),
        ("dtype", r"set model\.dtype"),
    ],
)
def test_options_that_grpocli_sets_are_refused(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.vllm_args\.{name}: .*{instead}"):
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
        ("data_parallel", 0),
        ("max_restarts", -1),
        ("reconnect_timeout", 0),
    ],
)
def test_bad_values_name_their_key(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^engine\.{field}="):
        Vllm(**{field: value})


def test_replicas_need_a_port_each() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.port=65535: .*each of `replicas` takes"):
        Vllm(port=65535, replicas=2)
    Vllm(port=65535)


def test_unsafe_environment_variables_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """These options would unpickle input or serve without a key."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_USE_RUST_FRONTEND", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "2")
    env = environment("the-key", Path("/dev/shm/x"), Path("/dev/shm/own"), Vllm())
    unsafe = ("VLLM_ALLOW_INSECURE", "VLLM_USE_RUST", "VLLM_ALLOW_RUNTIME")
    assert not [name for name in env if name.startswith(unsafe)]
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert env["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "2"


def test_nccl_and_the_user_may_choose_other_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert "NCCL_SOCKET_IFNAME" not in environment("key", Path("/x"), Path("/own"), Vllm(), transport="nccl")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert environment("key", Path("/x"), Path("/own"), Vllm())["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_environment_has_the_settings_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    env = environment("the-key", Path("/dev/shm/x"), Path("/dev/shm/own"), Vllm(cpu_kv_cache_gb=2))
    assert env["VLLM_API_KEY"] == "the-key"
    assert env["GRPOCLI_SHM_DIR"] == "/dev/shm/x"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert env["VLLM_PLUGINS"] == "mine,grpocli"
    assert env["PATH"] == os.environ["PATH"]
    assert "MASTER_ADDR" not in env


@pytest.mark.processes
def test_a_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    monkeypatch.setattr(vllm_config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[vllm\]'.*engine=transformers"), Vllm().launch(job):
        pass


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "check_plugin", lambda: None)
    monkeypatch.setattr(vllm_server, "on_cpu", lambda: True)


@pytest.mark.processes
def test_a_busy_port_is_reported(monkeypatch: pytest.MonkeyPatch, job: EngineJob, busy_port: int) -> None:
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=rf"engine\.port={busy_port}: .*in use"), Vllm(port=busy_port).launch(job):
        pass


@pytest.mark.processes
def test_a_users_folder_for_weights_is_created_and_kept(
    monkeypatch: pytest.MonkeyPatch, job: EngineJob, tmp_path: Path
) -> None:
    """The folder is created if missing, and kept; a failure is reported before the start."""
    installed(monkeypatch)
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('x')"])
    monkeypatch.setattr(vllm_server, "wait_healthy", lambda *_: None)
    folder = tmp_path / "shared" / "weights"
    spec = ServerSpec(replace(job, sync_folder=str(folder)), vllm_server.free_port(), None)
    with serving(spec, Vllm(), tmp_path / "log") as (endpoint, _):
        assert endpoint.shm_dir == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.is_dir()
    (tmp_path / "file").touch()
    bad = replace(spec, job=replace(job, sync_folder=str(tmp_path / "file" / "below")))
    with (
        pytest.raises(ConfigError, match=r"^sync\.folder=.*cannot be made: Not a directory"),
        serving(bad, Vllm(), tmp_path / "log"),
    ):
        pass


@pytest.mark.processes
@pytest.mark.parametrize("status", [200, 500])
def test_a_new_server_gets_a_first_request_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: EngineJob, status: int
) -> None:
    installed(monkeypatch)
    stand_in, asked = StandIn(), threading.Event()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == GENERATE and body["token_ids"] == FIRST_REQUEST:
            asked.set()
            stand_in.closed.wait()
        return status, {}

    stand_in.answer = answer
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(vllm_server, "wait_healthy", lambda *_: None)
    monkeypatch.setattr(vllm_server, "address", lambda *_: stand_in.url)
    with serving(ServerSpec(job, vllm_server.free_port(), None), Vllm(), tmp_path / "log"):
        assert asked.wait(30)
    stand_in.close()


@pytest.mark.processes
def test_a_context_too_small_for_the_run_is_refused(job: EngineJob) -> None:
    with (
        pytest.raises(ConfigError, match=r"engine\.max_model_len=100: .*128 tokens"),
        Vllm(max_model_len=100).launch(job),
    ):
        pass


@pytest.mark.processes
def test_a_failed_start_reports_its_cause(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    installed(monkeypatch)
    code = (
        "import sys; print('x'); sys.exit('(EngineCore pid=9) ERROR 11-21 [core.py:1] ValueError: too little memory')"
    )
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", code])
    with (
        pytest.raises(EngineError, match=r"exit code 1 .*ValueError: too little memory \(see .*vllm_0\.log\)"),
        Vllm().launch(job),
    ):
        pass


@pytest.mark.processes
def test_a_server_that_does_not_answer_in_time_is_reported(monkeypatch: pytest.MonkeyPatch, job: EngineJob) -> None:
    installed(monkeypatch)
    monkeypatch.setattr(vllm_server, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    options = replace(Vllm(), start_timeout=1)
    with pytest.raises(EngineError, match=r"/health within 1 s \(engine\.start_timeout\)"), options.launch(job):
        pass


OTHER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Other(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" or "Bearer ours" in str(self.headers) else 401)
        self.end_headers()
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Other).serve_forever()
"""


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
        guarded([sys.executable, "-c", OTHER, str(port)], name="other", grace=0.2),
        guarded([sys.executable, "-c", code], name="ours", grace=0.2) as process,
    ):
        deadline = time.monotonic() + 20
        while not listens(port) or (said and "7" in said and process.poll() is None):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if said is None:
            wait_healthy(process, Endpoint(url, key, ""), tmp_path / "log", timeout=10)
            return
        with pytest.raises(EngineError, match=said):
            wait_healthy(process, Endpoint(url, key, ""), tmp_path / "log", timeout=2)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_cause_of_a_failure_is_its_first_error(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: of an earlier run\n")
    since = log.stat().st_size
    assert failure_cause(log, since) == f": see {log}"
    with log.open("a") as file:
        file.write("(Worker pid=1) ERROR 11-21 08:29:52 [executor.py:1063] RuntimeError: Unsupported head_dim=16\n")
        file.write("(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n")
    advice = "vLLM's attention has no kernel for this model's head size: take engine=transformers, which supports any"
    assert failure_cause(log, since) == f": {advice}: RuntimeError: Unsupported head_dim=16 (see {log})"
    log.write_text("usage: x\napi_server.py: error: something else\n")
    assert failure_cause(log) == f": api_server.py: error: something else (see {log})"
    assert failure_cause(tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            (
                "RuntimeError: Worker failed with error 'Available memory on node 0 (1/2 GiB) on kv cache allocation "
                "is less than requested memory for kv (500.0 GiB).', please check the stack trace above for the root"
            ),
            "lower engine.cpu_kv_cache_gb",
        ),
        (
            (
                "ValueError: Free memory on device cuda:0 (10.1/79.2 GiB) on startup is less than desired GPU memory "
                "utilization (0.9, 71.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by others."
            ),
            "lower engine.gpu_memory_utilization",
        ),
        (
            (
                "ValueError: To serve at least one request with the model's max seq len (131072), (14 GiB KV cache is "
                "needed, which is larger than the available KV cache memory (1.0 GiB). Based on the available memory"
            ),
            "raise engine.gpu_memory_utilization (CPU: engine.cpu_kv_cache_gb), or lower engine.max_model_len",
        ),
        ("ValueError: No available memory for the cache blocks. Try", "raise engine.gpu_memory_utilization"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "lower engine.gpu_memory_utilization"),
        ("RuntimeError: Unsupported head_dim=8", "take engine=transformers"),
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=8 isa=1", "take engine=transformers"),
        ("ValueError: Head size 8 is not supported by CPU_ATTN", "take engine=transformers"),
        (
            "ValueError: Selected backend AttentionBackendEnum.X is not valid. Reason: ['head_size not supported']",
            "take engine=transformers",
        ),
        (
            "ValueError: User-specified max_model_len (768) is greater than the derived max_model_len (512)",
            "own context",
        ),
        ("api_server.py: error: argument --max-num-seqs: invalid int value: 'a'", "change engine.vllm_args"),
        ("api_server.py: error: unrecognized arguments: --max-num-seq=8", "change engine.vllm_args"),
    ],
)
def test_the_key_to_change_is_named(tmp_path: Path, said: str, told: str) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"usage: x\n(EngineCore pid=9) ERROR 11-21 08:29:52 [core.py:1063] {said}\n")
    cause = failure_cause(log)
    assert told in cause.partition(said[-30:])[0]
    assert said.partition(": ")[2][40:100] in cause
    assert "stack trace" not in cause


def test_the_details_of_a_refused_option_are_told(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
        "max_num_seqs\n"
        "  Input should be at least 1 [type=greater, input_value=-3, input_type=int]\n"
    )
    cause = failure_cause(log)
    assert "change engine.vllm_args" in cause
    assert "max_num_seqs Input should be at least 1" in cause


def test_any_option_of_vllm_can_be_set() -> None:
    """No `+` of Hydra is needed; other keys of the engine stay typed."""
    from omegaconf import OmegaConf

    from grpocli.config.parts import stored

    node = stored("engine")["vllm"]
    config = OmegaConf.create({"engine": node})
    OmegaConf.set_struct(config, True)
    OmegaConf.update(config, "engine.vllm_args.max_num_seqs", 8)
    assert config.engine.vllm_args == {"max_num_seqs": 8}
    OmegaConf.update(config, "engine.speculative.method", "ngram")
    assert config.engine.speculative == {"method": "ngram"}
    with pytest.raises(Exception, match="prt"):
        OmegaConf.update(config, "engine.prt", 8)
