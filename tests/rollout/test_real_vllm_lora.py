"""LoRA with one real vLLM server: a sync sends the adapter and leaves the base weights as they are."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cli.family import wait_gone
from rollout.vllm_tiny import TOKENIZER, Alone, TinyPolicy, assert_right, build_model

from grpocli.errors import ConfigError, EngineError
from grpocli.models.lora import Lora, adapter_tensors, attach, switched_off
from grpocli.processes.reaper import descendants
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.sync_config import SyncConfig
from grpocli.rollout.vllm import lora
from grpocli.rollout.vllm.client import MODEL, ServerClient, body, completions
from grpocli.rollout.vllm.engine import ServerPool
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.lora import AdapterSync
from grpocli.rollout.vllm.server_files import Endpoint, run_file
from grpocli.types import Completion, Request, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.survival]
RANK = 3  # alpha / rank is not a power of two, and vLLM pads the rank


class LoraPolicy(TinyPolicy):
    """A policy with LoRA updates of every linear layer but the head; vLLM fuses some (q, k, v; gate, up)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        attach(self.model, Lora(rank=RANK, alpha=7.5), seed=0)

    @torch.no_grad()
    def change(self, seed: int, by: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter += by * torch.randn(parameter.shape, generator=generator)

    def adapter_bytes(self) -> float:
        return 4.0 * sum(p.numel() for p in self.model.parameters() if p.requires_grad)


@dataclass
class Running:
    endpoint: Endpoint
    policy: LoraPolicy
    context: EngineContext

    def connect(self, **changes: Any) -> tuple[ServerClient, AdapterSync]:
        """Connect as a run that has just started."""
        client = ServerClient(self.endpoint, 60)
        return client, AdapterSync([client], replace(self.context, **changes))

    def folders(self) -> list[Path]:
        """The folders of adapters, without the server's lock and sockets."""
        return sorted(path for path in Path(self.endpoint.shm_dir).iterdir() if path.is_dir())

    def checksums(self) -> dict[str, str]:
        answer: dict[str, Any] = ServerClient(self.endpoint, 60).post("/weight_checker", {"action": "checksum"})
        return answer["checksums"]

    def cached_tokens(self) -> float:
        """Prompt tokens served from the prefix cache so far."""
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
        text = httpx.get(f"{self.endpoint.url}/metrics", headers=headers, trust_env=False).text
        return sum(float(n) for n in re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server started by the run, with tied embeddings. Nothing of it is left after the run."""
    folder = tmp_path_factory.mktemp("lora")
    model = build_model(folder / "model", tied=True)
    job = EngineJob(str(model), "float32", 256, folder / "run", seed=0, lora_rank=RANK)
    policy, before = LoraPolicy(model), set(descendants())
    with Vllm().launch(job):
        processes = [pid for pid in descendants() if pid not in before]
        endpoint = Endpoint.load(run_file(job.run_dir))
        yield Running(endpoint, policy, EngineContext(job, policy, TOKENIZER, Alone(), SyncConfig(canary=False)))  # type: ignore[arg-type]
    assert len(processes) >= 3
    assert wait_gone(processes, 5) == []
    assert not Path(endpoint.shm_dir).exists()
    assert not run_file(job.run_dir).exists()


def generate(
    client: ServerClient, prompt: list[int], n: int, tokens: int, version: int, times: int = 1
) -> list[Completion]:
    """`n` completions for each of several requests with the same prompt."""
    sampling = Sampling(tokens)
    requests = [Request(prompt, n, seed=version + 1000 * i) for i in range(times)]
    answers = dict[int, Any]()
    bodies = {i: body(request, sampling, []) for i, request in enumerate(requests)}
    ServerPool([client]).complete(bodies, answers.__setitem__)
    return [one for i, request in enumerate(requests) for one in completions(answers[i], request, sampling, version)]


def test_the_base_is_unchanged_to_the_bit_after_50_syncs(running: Running) -> None:
    client, sync = running.connect()
    policy, probe = running.policy, sync.verifier.token_ids
    checksums, base = running.checksums(), client.score(probe)
    assert len(checksums) > 10
    for version in range(1, 51):
        policy.change(seed=version, by=0.02)
        assert sync(version)["sync/bytes"] == policy.adapter_bytes()
        assert client.weight_version() == version
        assert client.model == f"policy-v{version}"
    assert set(client.adapters()) == {"policy-v49", "policy-v50"}, "the last adapter stays for requests in flight"
    assert running.folders() == sorted(client.adapters().values())
    assert client.score(probe) == pytest.approx(policy.score(probe), abs=1e-3)
    changes = [abs(a - b) for a, b in zip(client.score(probe), base, strict=True)]
    assert max(changes) > 0.1, "the updates change the log-probs"
    client.model = MODEL
    assert client.score(probe) == base
    with switched_off(policy.model):
        assert base == pytest.approx(policy.score(probe), abs=1e-3)
    assert running.checksums() == checksums
    sync.close()
    assert (client.adapters(), running.folders()) == ({}, [])


def test_no_block_of_the_prefix_cache_is_used_for_another_adapter(running: Running) -> None:
    """The prompt is longer than a block of the cache (128 tokens on a CPU)."""
    client, sync = running.connect()
    prompt = [2 + i % 90 for i in range(200)]
    for version in (1, 2, 2, 3):  # a version may be sent again
        running.policy.change(seed=version)
        sync(version)
        hits = []
        for _ in range(2):
            before = running.cached_tokens()
            for one in generate(client, prompt, 1, 8, version):
                assert_right(running.policy, prompt, one, Sampling(8))
                assert one.version == version
            hits.append(running.cached_tokens() - before)
        assert hits[0] == 0, "computed with the updates of an earlier version"
        assert hits[1] >= 128
    sync.close()


def test_requests_in_flight_keep_their_adapter(running: Running) -> None:
    """vLLM holds two adapters; requests that wait during three syncs still get theirs, which is removed afterwards."""
    client, sync = running.connect(in_flight=True)
    sync(1)
    old = LoraPolicy(Path(running.context.job.model_path))
    old.model.load_state_dict(running.policy.model.state_dict())
    done: list[Completion] = []
    thread = threading.Thread(target=lambda: done.extend(generate(client, [5, 6, 7], 128, 120, 1, times=3)))
    thread.start()
    while not client.adapters_in_use():
        assert thread.is_alive()
    for version in (2, 3, 4):
        running.policy.change(seed=version)
        sync(version)
    assert thread.is_alive(), "make the completions longer"
    assert set(client.adapters()) == {"policy-v1", "policy-v3", "policy-v4"}
    thread.join(600)
    assert len(done) == 3 * 128
    assert {(one.version, one.spans) for one in done} == {(1, None)}
    for one in done[::96]:
        assert_right(old, [5, 6, 7], one, Sampling(120))
    sync(5)
    probe = sync.verifier.token_ids
    assert client.score(probe) == pytest.approx(running.policy.score(probe), abs=1e-3)
    assert set(client.adapters()) == {"policy-v4", "policy-v5"}
    sync.close()


def test_a_corrupted_adapter_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupted(model: Any) -> list[tuple[str, torch.Tensor]]:
        (name, tensor), *others = adapter_tensors(model)
        return [(name, tensor.detach() * 1.5), *others]

    for in_flight in (False, True):
        client, sync = running.connect(in_flight=in_flight)
        sync(1)
        monkeypatch.setattr(lora, "adapter_tensors", corrupted)
        with pytest.raises(EngineError, match=r"does not have the trainer's weights after the sync to version 2"):
            sync(2)
        monkeypatch.undo()
    _, next_run = running.connect()
    next_run(1)
    assert list(client.adapters()) == ["policy-v1"], "the next run removes the folder of a failed one"
    assert running.folders() == list(client.adapters().values())
    next_run.close()


@pytest.mark.parametrize("part", ["", "down_proj"], ids=["no module", "no down_proj"])
def test_an_adapter_that_is_bound_to_nothing_is_found_by_the_canary(running: Running, monkeypatch, part: str) -> None:
    """While B is 0 the probe cannot see it."""

    def unbound(model: Any) -> list[tuple[str, torch.Tensor]]:
        return [(name, w * 0 if "lora_B" in name and part in name else w) for name, w in adapter_tensors(model)]

    policy = LoraPolicy(Path(running.context.job.model_path))
    monkeypatch.setattr(lora, "adapter_tensors", unbound)
    _, blind = running.connect(policy=policy, sync=SyncConfig(canary=False))
    blind(1)
    blind.close()
    client, sync = running.connect(policy=policy, sync=SyncConfig())
    said = rf"random updates of the 2 layers called {part or '.*_proj'} move .*; the server went 0% of the way .*vLLM"
    with pytest.raises(EngineError, match=rf"{said} binds the adapter to no"):
        sync(1)
    assert (client.adapters(), running.folders()) == ({}, [])
    assert all((p == 0).all() for name, p in policy.model.named_parameters() if "lora_B" in name)


def test_target_modules_that_vllm_lacks_are_named(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(model: Any) -> list[tuple[str, torch.Tensor]]:
        return [(name.replace("q_proj", "odd_proj"), tensor) for name, tensor in adapter_tensors(model)]

    monkeypatch.setattr(lora, "adapter_tensors", renamed)
    client, sync = running.connect()
    with pytest.raises(ConfigError, match=r"^model\.lora\.target_modules: .*odd_proj.*; target only .*o_proj"):
        sync(1)
    monkeypatch.undo()
    assert (client.adapters(), running.folders()) == ({}, [])
    sync(1)
    sync.close()
