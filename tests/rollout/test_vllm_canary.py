"""The canary of a first sync: what it changes, that it is undone bit for bit, and what it finds without a server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout.test_vllm_weight_sync import Server, context
from rollout.vllm_tiny import Alone, TinyPolicy, build_model
from transformers import LlamaForCausalLM

from grpocli.errors import EngineError
from grpocli.models.lora import Lora, attach
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm.client import CANARY, ServerClient
from grpocli.rollout.vllm.lora import AdapterSync
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.rollout.vllm.weight_sync import PolicyWeights, WeightSync
from grpocli.rollout.vllm.weight_verifier import (
    ADAPTER_ATTEMPTS,
    HEAD_NORM,
    LEAST,
    MOVED,
    ROW_NORM,
    TOLERANCE,
    adapter_kinds,
    canary_adapter,
    canary_tells,
    canary_weights,
    mean_gap,
    probe_prompt,
    require_followed,
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture
def policy(folder: Path) -> TinyPolicy:
    return TinyPolicy(folder)


def copies(policy: TinyPolicy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_every_weight_changes_and_comes_back_bit_for_bit(policy: TinyPolicy) -> None:
    """Also zeros with a sign, subnormal numbers, and huge and tiny rows; also if the block raises."""
    with torch.no_grad():
        weight = policy.model.model.layers[0].mlp.down_proj.weight
        weight[0], weight[1], weight[2] = -0.0, 1e30, 3e-39
        weight[3, 0], weight[4], weight[5, :2] = 1e-42, 1e-30, torch.tensor([1.1e-27, 1e18])
        policy.model.model.norm.weight[:3] = torch.tensor([0.0, 5e-45, -1e20])
    before = copies(policy)
    with suppress(KeyError), canary_weights(policy):  # type: ignore[arg-type]
        changed = copies(policy)
        raise KeyError
    for name, tensor in changed.items():
        assert not torch.equal(tensor, before[name]), name
        assert torch.isfinite(tensor).all(), name
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())


def test_rows_have_random_signs_and_calm_norms(policy: TinyPolicy) -> None:
    before = copies(policy)
    heads = ("embed_tokens", "lm_head")
    with canary_weights(policy):  # type: ignore[arg-type]
        for name, parameter in policy.model.named_parameters():
            rows = before[name].reshape(len(parameter), -1)
            some = (rows != 0).all(-1)  # the row of a padding token is 0
            factors = parameter.detach().reshape(rows.shape)[some] / rows[some]
            assert torch.equal(factors.abs().log2().round(), factors.abs().log2()), "powers of two"
            assert 0.25 < (factors[:, 0] > 0).float().mean() < 0.75, name
            if parameter.dim() > 1:
                target = HEAD_NORM if any(head in name for head in heads) else ROW_NORM
                norms = parameter[some].norm(dim=-1) / target
                assert norms.min() > 0.7
                assert norms.max() < 1.42


def test_each_weight_alone_moves_the_probe_beyond_the_tolerance(policy: TinyPolicy) -> None:
    """A server that keeps one of them does not follow."""
    probe = probe_prompt(96)
    own, start = copies(policy), policy.score(probe)
    with canary_weights(policy):  # type: ignore[arg-type]
        expected = policy.score(probe)
        assert mean_gap(start, expected) > MOVED
        for name, parameter in policy.model.named_parameters():
            with torch.no_grad():
                changed = parameter.clone()
                parameter.copy_(own[name])
                assert mean_gap(policy.score(probe), expected) > TOLERANCE["bfloat16"], name
                parameter.copy_(changed)


def test_a_canary_that_moves_nothing_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not canary_tells([-1.0, -2.0], [-1.0, -2.001])
        assert not canary_tells([-1.0, -2.0], [-1.0, float("nan")])
    assert "proves nothing about this model" in caplog.text
    assert canary_tells([-1.0, -2.0], [-4.0, -2.0])
    assert canary_tells([], []), "other processes do not decide"


def test_a_model_that_no_canary_moves_is_synced_without_it(
    folder: Path, policy: TinyPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    score = policy.score(probe_prompt(96))
    policy.score = lambda token_ids: score[: len(token_ids) - 1]  # type: ignore[method-assign]
    server = Replica(tmp_path, folder)
    sync = sync_of(policy, [server], tolerance=1e9)
    sync(1)
    sync(2)
    assert [call for call in server.calls if "version " in call] == ["version 1", "version 2"]
    assert caplog.text.count("proves nothing about this model") == 1


# Adapters


def test_an_adapters_canary_moves_the_probe_and_is_undone(policy: TinyPolicy) -> None:
    attach(policy.model, Lora(rank=3, alpha=7.5), seed=0)
    before, probe = copies(policy), probe_prompt(96)
    start = policy.score(probe)
    kinds = adapter_kinds(policy)  # type: ignore[arg-type]
    assert set(kinds) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for kind, layers in kinds.items():
        assert len(layers) == 2
        with canary_adapter(policy, layers, lambda: mean_gap(start, policy.score(probe))) as moved:  # type: ignore[arg-type]
            assert moved == mean_gap(start, policy.score(probe)) > LEAST
            changed = {name for name, now in copies(policy).items() if not torch.equal(now, before[name])}
            assert changed == {f"{name}.lora_B.default.weight" for name, _ in layers}, kind
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())


def adapter_sync(
    policy: TinyPolicy, follows: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[AdapterSync, Any, list[str]]:
    """A sync to one server; follows: whether its log-probs follow, for each kind of layer and attempt."""
    server: Any = SimpleNamespace(proven=False)
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
    attach(policy.model, Lora(rank=3, alpha=7.5), seed=0)
    before = copies(policy)
    sync, server, tried = adapter_sync(policy, lambda kind, time: time >= 2 or kind != "k_proj", monkeypatch)
    sync._send_canaries([server])
    assert (server.proven, len(tried), tried.count("k_proj")) == (True, 8, 2)
    sync, server, tried = adapter_sync(policy, lambda kind, time: kind != "v_proj", monkeypatch)
    with pytest.raises(
        EngineError, match=r"random updates of the 2 layers called v_proj, .* in the median; the server"
    ):
        sync._send_canaries([server])
    assert (server.proven, tried.count("v_proj")) == (False, ADAPTER_ATTEMPTS)
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())


# A server


class Replica(Server):
    """Scores with the weights that it has loaded over those that it started with."""

    def __init__(self, folder: Path, model: Path, faults: tuple[str, ...] = ()) -> None:
        super().__init__(folder)
        self.replica: Any = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.faults = faults

    def finish_update(self, version: int | str) -> None:
        super().finish_update(version)  # type: ignore[arg-type]
        kept = {name: tensor for name, tensor in self.loaded.items() if not any(part in name for part in self.faults)}
        self.replica.load_state_dict(kept, strict=False)
        self.calls.append(f"version {version}")

    @torch.no_grad()
    def _scored(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids])
        logp: list[float] = self.replica(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return logp

    def score(self, token_ids: list[int], first: bool) -> list[float]:
        super().score(token_ids, first)
        return self._scored(token_ids)

    def sample(self, token_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        self._call("sample")
        ids = list(range(tokens))
        return ids, self._scored([*token_ids, *ids])[-tokens:]


class OnlySome:
    """A transport that hands tensors over by reference, like ipc; nothing of a canary may stay with it."""

    def __init__(self, weights: PolicyWeights, log: list[str]) -> None:
        self.weights, self.log, self.collective = weights, log, True

    def send(self, servers: list[Any], stream: Iterator[tuple[str, torch.Tensor]], version: int | str) -> int:
        named = {name: tensor.clone() for name, tensor in stream}
        self.log.append(f"{version} to {len(servers)}")
        for server in servers:
            server.prepared, server.loaded = True, named
            server.finish_update(version)
        return self.weights.bytes()

    def close(self) -> None:
        self.log.append("closed")


def sync_of(policy: TinyPolicy, servers: list[Any], transport: list[str] | None = None, **options: Any) -> WeightSync:
    from grpocli.rollout.vllm.engine import make_synchronizer

    made: Any = context(**{"canary": True} | options)
    made.policy = policy
    if transport is None:
        return make_synchronizer(servers, made)  # type: ignore[return-value]
    weights = PolicyWeights(policy, torch.float32)  # type: ignore[arg-type]
    return WeightSync(servers, made, lambda: OnlySome(weights, transport))


@pytest.mark.parametrize("by_reference", [False, True], ids=["shm", "another transport"])
def test_a_server_follows_a_canary_and_then_has_the_true_weights(
    folder: Path, policy: TinyPolicy, tmp_path: Path, by_reference: bool
) -> None:
    server, before, log = Replica(tmp_path, folder), copies(policy), list[str]()
    sync = sync_of(policy, [server], log if by_reference else None)
    metrics = sync(1)
    assert metrics["sync/seconds/canary"] > 0
    assert [call for call in server.calls if "version " in call] == ["version canary", "version 1"]
    assert all(torch.equal(server.loaded[name], tensor) for name, tensor in before.items())
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())
    assert server.calls.count("reset_prefix_cache") == 2
    server.calls.clear()
    sync(2)
    assert [call for call in server.calls if "version " in call] == ["version 2"]
    assert "sample" not in server.calls
    assert server.calls.count("init_transfer") == 0


@pytest.mark.parametrize("part", ["layers.1.self_attn.o_proj", "layers.0.input_layernorm", "model.norm", "embed"])
def test_a_server_that_keeps_a_weight_passes_the_probe_and_not_the_canary(
    folder: Path, policy: TinyPolicy, tmp_path: Path, part: str
) -> None:
    before = copies(policy)
    sync_of(policy, [Replica(tmp_path, folder, (part,))], canary=False)(1)
    with pytest.raises(
        EngineError,
        match=r"does not follow the trainer's weights: a canary, with other signs and sizes of the rows of all "
        r"weights, moves .* by \d+\.\d+ nats on average; the server went -?\d+% of the way and differs by .*a "
        r"parameter that vLLM's loader skips or renames.*sync\.canary=false",
    ):
        sync_of(policy, [Replica(tmp_path, folder, (part,))])(1)
    assert all(same_bits(tensor, before[name]) for name, tensor in copies(policy).items())


def test_a_server_that_comes_back_gets_a_canary_and_the_others_do_not(
    folder: Path, policy: TinyPolicy, tmp_path: Path
) -> None:
    """The others may hold requests, which must not see a canary's weights; afterwards all are prepared together."""
    servers = [Replica(tmp_path, folder), Replica(tmp_path, folder)]
    log: list[str] = []
    sync = sync_of(policy, servers, log)
    sync(1)
    servers[1] = sync.servers[1] = Replica(tmp_path, folder)
    for server in servers:
        server.calls.clear()
    log.clear()
    sync(1)
    assert log == ["canary to 1", "closed", "1 to 2"]
    assert [[call for call in server.calls if "version " in call] for server in servers] == [
        ["version 1"],
        ["version canary", "version 1"],
    ]


def test_a_checkpoint_under_way_is_written_before_the_weights_change(
    folder: Path, policy: TinyPolicy, tmp_path: Path
) -> None:
    before, seen = copies(policy), list[bool]()

    def reads() -> None:
        seen.append(all(torch.equal(tensor, before[name]) for name, tensor in copies(policy).items()))

    sync = sync_of(policy, [Replica(tmp_path, folder)])
    sync._before_change = reads
    sync(1)
    sync(2)
    assert seen == [True], "a sync without a canary changes nothing and waits for nothing"


def test_a_failed_true_sync_after_a_canary_is_repeated_without_it(
    folder: Path, policy: TinyPolicy, tmp_path: Path
) -> None:
    """The repetition is verified as the first attempt would have been, also if few syncs are."""
    server = Replica(tmp_path, folder)
    sync = sync_of(policy, [server], verify_every=3)
    score, calls = server.score, list[int]()

    def fails_once(token_ids: list[int], first: bool) -> list[float]:
        calls.append(1)
        if len(calls) == 2:  # the probe of the true weights
            raise EngineError("it died")
        return score(token_ids, first)

    server.score = fails_once  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="it died"):
        sync(1)
    server.calls.clear()
    sync(1)
    assert [call for call in server.calls if "version " in call] == ["version 1"]
    assert (len(calls), server.calls.count("sample")) == (3, 1)
    server.calls.clear()
    sync(2)
    assert (len(calls), server.calls.count("sample")) == (3, 0)


def test_keys_and_values_of_the_canary_are_found(folder: Path, policy: TinyPolicy, tmp_path: Path) -> None:
    """The probe itself reads no cache, so a server that keeps one shows it in what it samples after a long prompt."""
    server = Replica(tmp_path, folder)
    sample, first = server.sample, list[tuple[list[int], list[float]]]()

    def from_old_keys(token_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        first.append(sample(token_ids, tokens))
        return first[0]

    server.sample = from_old_keys  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="does not have the trainer's weights after the sync to version 1"):
        sync_of(policy, [server])(1)


def test_nothing_is_sampled_with_a_canarys_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that was killed between the canary and the true weights leaves this label on an external server."""
    import asyncio

    client = ServerClient(Endpoint("http://127.0.0.1:1", "k", str(tmp_path)), 5, run="r")
    answer = {
        "choices": [
            {
                "index": 0,
                "token_ids": [1],
                "finish_reason": "stop",
                "weight_versions": [{"version": f"r.{CANARY}", "start": 0, "end": 1}],
            }
        ]
    }

    async def answers(method: str, path: str, body: Any, read: Any) -> Any:
        return read(answer)

    monkeypatch.setattr(client.connection, "request", answers)
    with pytest.raises(EngineError, match="sampled with a canary's weights"):
        asyncio.run(client.generate({}))
    monkeypatch.setattr(client, "get", lambda path, read: read({"weight_version": f"r.{CANARY}"}))
    client._version(client.connection, "r.7")
    assert client.weight_version() == CANARY, "the next sync of the run goes on"
    monkeypatch.setattr(client, "get", lambda path, read: read({"weight_version": f"other.{CANARY}"}))
    with pytest.raises(EngineError, match="another run has changed the weights"):
        client.weight_version()


def test_the_refusal_says_how_far_the_server_went() -> None:
    start, trainer = [-1.0, -1.0], [-4.0, -5.0]
    require_followed([-4.0, -5.1], trainer, start, 0.1, "x", "y", mean_gap)
    with pytest.raises(EngineError, match=r"by 3\.500 nats on average; the server went 0% of the way and differs by 3"):
        require_followed(start, trainer, start, 0.1, "x", "y", mean_gap)
    with pytest.raises(EngineError, match="the server went nowhere, its log-probs are not finite"):
        require_followed([float("nan"), -1.0], trainer, start, 0.1, "x", "y", mean_gap)
