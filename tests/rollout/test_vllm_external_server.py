"""Errors for a server at `engine.base_url` that is missing, locked, too old, or another run's; with stand-ins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout.stand_in import StandIn

from grpocli.errors import ConfigError
from grpocli.rollout.engine import EngineJob
from grpocli.rollout.vllm import config as vllm_config
from grpocli.rollout.vllm import external
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.external import external_server, find_endpoint, misfit
from grpocli.rollout.vllm.plugin import BACKENDS
from grpocli.rollout.vllm.server_files import Endpoint, serve_file

KEY = "the-key"


class VllmServe(StandIn):
    """A vllm-serve stand-in; `answers[path]` overrides a response."""

    def __init__(self, shm_dir: Path) -> None:
        super().__init__()
        self.answers: dict[str, tuple[int, Any]] = {}
        self.folder, self.port = shm_dir, self.server.server_address[1]
        self.answer = self.respond

    def respond(self, path: str, body: Any) -> tuple[int, Any]:
        path, key = self.heard[-1]
        if path in self.answers:
            return self.answers[path]
        if path != "/health" and key != f"Bearer {KEY}":
            return 401, {"error": "needs its key"}
        known: dict[str, Any] = {"/health": {}, "/version": {"version": "0.1.2"}}
        known |= {"/weight_info": {"weight_version": "default"}, "/server_info": {"vllm_config": served()}}
        return (200, known[path]) if path in known else (404, {"detail": "Not Found"})


def served(**model: Any) -> dict[str, Any]:
    config = {"model": "/not/here", "dtype": "torch.float32", "max_model_len": 128}
    config |= {"logprobs_mode": "processed_logprobs", "served_model_name": "policy"}
    return {"model_config": config | model, "weight_transfer_config": {"backend": "shm"}, "lora_config": None}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[VllmServe]:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = VllmServe(tmp_path)
    Endpoint(server.url, KEY, str(tmp_path)).save(serve_file(server.port))
    yield server
    server.close()


@pytest.fixture
def job(tmp_path: Path) -> EngineJob:
    return EngineJob("/other", "float32", 128, tmp_path / "run", seed=0)


def test_a_suitable_server_is_accepted(stand_in: VllmServe, job: EngineJob) -> None:
    """The key and folder come from vllm-serve's file."""
    options = Vllm(base_url=stand_in.url + "/")
    assert external_server(options, *options.urls, job) == Endpoint(stand_in.url, KEY, str(stand_in.folder))


def test_a_dead_server_is_not_reported_as_a_missing_key(stand_in: VllmServe, job: EngineJob) -> None:
    serve_file(stand_in.port).unlink()
    options = Vllm(base_url=stand_in.url)
    with pytest.raises(ConfigError, match=rf"engine\.api_key_file=None: no key for {stand_in.url}"):
        external_server(options, stand_in.url, job)
    assert stand_in.heard == [("/health", "Bearer none")]
    stand_in.answers["/health"] = (503, {"error": "the engine is dead"})
    with pytest.raises(ConfigError, match=r"engine\.base_url=.*no vLLM server answers there.*the engine is dead"):
        external_server(options, stand_in.url, job)
    stand_in.close()
    with pytest.raises(ConfigError, match=r"engine\.base_url=.*no vLLM server answers there: start one with"):
        external_server(options, stand_in.url, job)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/weight_info": (401, {})}, r"refuses the key: set engine\.api_key_file"),
        ({"/weight_info": (404, {})}, r"not a vLLM server for training: start one with `grpocli vllm-serve`"),
        ({"/server_info": (200, {"other": 1})}, r"not a vLLM server for training: start one with"),
    ],
)
def test_unsuitable_servers_are_refused(
    stand_in: VllmServe, job: EngineJob, answers: dict[str, tuple[int, Any]], message: str
) -> None:
    stand_in.answers.update(answers)
    with pytest.raises(ConfigError, match=rf"^engine\.base_url={stand_in.url}: .*{message}"):
        external_server(Vllm(base_url=stand_in.url), stand_in.url, job)


def test_a_folder_of_weights_that_this_machine_lacks_is_refused(
    stand_in: VllmServe, job: EngineJob, tmp_path: Path
) -> None:
    Endpoint(stand_in.url, KEY, "/of/another/machine").save(serve_file(stand_in.port))
    options = Vllm(base_url=stand_in.url)
    with pytest.raises(ConfigError, match=rf"sync\.folder=None: must be the folder that the server at {stand_in.url}"):
        external_server(options, stand_in.url, job)
    assert external_server(options, stand_in.url, replace(job, sync_folder=str(tmp_path))).shm_dir == str(tmp_path)


@pytest.mark.parametrize(("transport", "rank"), [("nccl", 0), ("ipc", 0), ("shm", 0), ("nccl", 8)])
def test_another_minor_version_of_vllm_cannot_send_weights(
    stand_in: VllmServe, job: EngineJob, monkeypatch: pytest.MonkeyPatch, transport: str, rank: int
) -> None:
    """Only nccl and ipc send with the trainer's vLLM, so only they need one."""
    monkeypatch.setattr(external, "check_vllm", lambda engine: None)
    monkeypatch.setattr(external, "vllm_version", lambda: "0.33.0")
    stand_in.answers["/version"] = 200, {"version": "0.32.1"}
    description = {"weight_transfer_config": {"backend": BACKENDS[transport]}, "lora_config": {"max_lora_rank": rank}}
    stand_in.answers["/server_info"] = 200, {"vllm_config": served() | description}
    options, job = Vllm(base_url=stand_in.url), replace(job, transport=transport, lora_rank=rank)
    if rank or transport == "shm":
        assert external_server(options, stand_in.url, job)
        return
    sends = f"runs vLLM 0.32.1, and sync={transport} sends with the trainer's vLLM 0.33.0: install the same version"
    with pytest.raises(ConfigError, match=re.escape(sends)) as caught:
        external_server(options, stand_in.url, job)
    assert (caught.value.key, caught.value.value) == ("engine.base_url", stand_in.url)
    monkeypatch.setattr(external, "check_vllm", vllm_config.check_vllm)
    monkeypatch.setattr(vllm_config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        external_server(options, stand_in.url, job)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch, cache_folder: Path) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    here, there = "http://localhost:8000", "http://elsewhere:8000"
    with pytest.raises(ConfigError, match=r"engine\.api_key_file=None: no key for http://localhost:8000"):
        find_endpoint(Vllm(base_url=here), here)
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    assert find_endpoint(Vllm(base_url=here), here) == Endpoint(here, "from-environment", "")
    monkeypatch.setenv("VLLM_API_KEY", "a-secret\n")  # as a file with line ends of Windows gives it
    with pytest.raises(ConfigError, match="no header can have") as refused:
        find_endpoint(Vllm(base_url=here), here)
    assert "a-secret" not in str(refused.value)
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    Endpoint("http://127.0.0.1:8000", "from-serve", "/shm").save(serve_file(8000))
    assert find_endpoint(Vllm(base_url=here), here) == Endpoint(here, "from-serve", "/shm")
    assert find_endpoint(Vllm(base_url=there), there).api_key == "from-environment"
    copy = tmp_path / "copy"
    Endpoint("http://127.0.0.1:9000", "from-copy", "/shm").save(copy)
    found = find_endpoint(Vllm(base_url=there, api_key_file=str(copy)), there, "/mine")
    assert found == Endpoint(there, "from-copy", "/mine")
    copied = Vllm(base_url=[there, here], api_key_file=[str(serve_file(8000)), str(copy)])
    assert [find_endpoint(copied, url).api_key for url in (there, here)] == ["from-serve", "from-copy"]
    copy.write_text("a key alone")
    for wrong in ("/no/such", str(copy)):
        with pytest.raises(ConfigError, match=r"engine\.api_key_file=.* is not the file that `grpocli vllm-serve`"):
            find_endpoint(Vllm(base_url=here, api_key_file=wrong), here)


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ({}, {}, ""),
        ({"dtype": "torch.bfloat16"}, {}, "dtype"),
        ({"max_model_len": 64}, {}, "max_model_len"),
        ({"logprobs_mode": "raw_logprobs"}, {}, "not started for training"),
        ({"served_model_name": "gpt"}, {}, "not started for training"),
        ({}, {"transport": "nccl"}, "another sync"),
        ({"hf_overrides": {"head_dtype": "float32"}}, {}, ""),
        ({"hf_overrides": {"rope_theta": 1.0}}, {"dtype": "bfloat16"}, ""),
        ({"hf_overrides": {"head_dtype": "float32"}}, {"dtype": "bfloat16"}, "model.head_dtype"),
        ({"hf_overrides": None}, {"dtype": "bfloat16", "head_dtype": "float32"}, "model.head_dtype"),
        ({}, {"lora_rank": 4}, "model.lora.rank"),
        ({"rank": 8}, {"lora_rank": 9}, "up to rank 8: serve with model.lora.rank=9"),
        ({"rank": 8}, {}, "model.lora.rank"),
        ({"rank": 8}, {"lora_rank": 8}, ""),
    ],
)
def test_a_server_that_cannot_serve_the_job_is_refused(
    job: EngineJob, theirs: dict[str, Any], ours: dict[str, Any], told: str
) -> None:
    job = replace(job, **ours)
    rank = theirs.pop("rank", 0)
    description = served(**{"dtype": f"torch.{job.dtype}"} | theirs) | {"lora_config": rank and {"max_lora_rank": rank}}
    found = misfit(description, job)
    assert told in found
    assert bool(found) == bool(told)
