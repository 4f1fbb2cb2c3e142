"""The canary of an adapter: what it changes, that it is undone bit for bit, and when a server is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout.vllm_tiny import Alone, TinyPolicy, build_model

from grpocli.errors import EngineError
from grpocli.models.lora import Lora, attach
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm.lora import ATTEMPTS, LEAST, AdapterSync, adapter_kinds, canary_adapter, gaps
from grpocli.rollout.vllm.weight_sync import mean, probe_prompt


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> TinyPolicy:
    made = TinyPolicy(build_model(tmp_path, tied=request.param))
    attach(made.model, Lora(rank=3, alpha=7.5), seed=0)
    return made


def copies(policy: TinyPolicy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_an_adapters_canary_moves_the_probe_and_is_undone(policy: TinyPolicy) -> None:
    before, probe = copies(policy), probe_prompt(96)
    start = policy.score(probe)
    kinds = adapter_kinds(policy)  # type: ignore[arg-type]
    assert set(kinds) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for kind, layers in kinds.items():
        assert len(layers) == 2
        with canary_adapter(policy, layers, lambda: mean(gaps(start, policy.score(probe)))) as moved:  # type: ignore[arg-type]
            assert moved == mean(gaps(start, policy.score(probe))) > LEAST
            changed = {name for name, now in copies(policy).items() if not torch.equal(now, before[name])}
            assert changed == {f"{name}.lora_B.default.weight" for name, _ in layers}, kind
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())


def adapter_sync(
    policy: TinyPolicy, follows: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[AdapterSync, Any, list[str]]:
    """A sync to one server; follows: whether its log-probs follow, for each kind of layer and attempt."""
    server: Any = SimpleNamespace(prepared=False)
    job = EngineJob("model", "bfloat16", 64, Path(), seed=0, lora_rank=3)
    sync = AdapterSync([server], EngineContext(job, policy, object(), Alone()))  # type: ignore[arg-type]
    tried, start = list[str](), policy.score(sync.verifier.token_ids)

    def score(server: Any, kind: str, tensors: dict[str, torch.Tensor]) -> list[float]:
        tried.append(kind)
        return policy.score(sync.verifier.token_ids) if follows(kind, tried.count(kind)) else start

    monkeypatch.setattr(sync, "_score_adapter", score)
    return sync, server, tried


def test_an_adapter_is_refused_only_after_several_attempts(policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 one random adapter in twenty moves a trained model's log-probs far by rounding alone."""
    before = copies(policy)
    sync, server, tried = adapter_sync(policy, lambda kind, time: time >= 2 or kind != "k_proj", monkeypatch)
    sync._send_canaries([server])
    assert (len(tried), tried.count("k_proj")) == (8, 2)
    sync, server, tried = adapter_sync(policy, lambda kind, time: kind != "v_proj", monkeypatch)
    with pytest.raises(EngineError, match=r"updates of the 2 layers called v_proj move .* nats in the median"):
        sync._send_canaries([server])
    assert tried.count("v_proj") == ATTEMPTS
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())
