"""Errors of a run when a server is slow, dead, broken or not the expected one; with a stand-in server."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from rollout.stand_in import StandIn, choice, clients_of
from rollout.vllm_tiny import Alone

from grpocli.errors import EngineError, EngineGone
from grpocli.rollout.vllm import client as vllm_client
from grpocli.rollout.vllm.client import GENERATE, ServerClient, ServerGone, spread_seed
from grpocli.rollout.vllm.engine import REQUESTS, ServerPool, VllmEngine
from grpocli.rollout.vllm.server_files import Endpoint
from grpocli.types import Request, Sampling


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


@pytest.fixture
def client(stand_in: StandIn) -> ServerClient:
    return clients_of(stand_in)[0]


def generate(client: ServerClient, n: int, max_tokens: int = 2) -> Any:
    """Completions of an engine whose syncs always work, and whose server comes back at once."""
    back, world = Mock(return_value=[client.endpoint]), cast("Any", Alone())
    sync = Mock(return_value={})
    engine = VllmEngine(ServerPool([client]), sync, stop=[1], version=0, world=world, reconnect=back)
    return engine.generate([Request([i], 1, seed=i) for i in range(n)], Sampling(max_tokens))


def test_answers_keep_the_order_of_requests_and_concurrency_is_bounded(stand_in: StandIn, client: ServerClient) -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        time.sleep(0.05 if body["token_ids"][0] % 2 else 0.01)
        return 200, {"choices": [choice([body["token_ids"][0]] * 2)]}

    stand_in.answer = answer
    results = generate(client, 2 * REQUESTS + 5)
    assert [group[0].token_ids[0] for group in results] == list(range(2 * REQUESTS + 5))
    assert 4 < stand_in.max_in_flight <= REQUESTS


def keep_busy(stand_in: StandIn, seconds: float, tokens: int = 0) -> None:
    """Requests take `seconds`; `tokens` more tokens are generated between two polls."""
    polls = count()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/health":
            return 200, {}
        if path == "/metrics":
            counts = f'vllm:generation_tokens_total{{engine="0",model_name="policy"}} {tokens * next(polls)}.0'
            return 200, f"# TYPE vllm:generation_tokens_total counter\n{counts}\n".encode()
        stand_in.closed.wait(seconds)
        return 200, {"choices": [choice([5])]}

    stand_in.answer = answer


def test_a_server_that_does_nothing_is_stuck(stand_in: StandIn) -> None:
    keep_busy(stand_in, seconds=2)
    for call in (ServerClient.pause, lambda client: asyncio.run(client.generate({}))):
        (client,) = clients_of(stand_in, timeout=0.2)
        with pytest.raises(ServerGone, match=r"did not answer .* within 0\.2 s \(engine\.request_timeout\)") as caught:
            call(client)
        assert client.lost is caught.value


def test_a_server_that_computes_tokens_gets_more_time(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may queue for longer than the timeout."""
    monkeypatch.setattr(vllm_client, "CHECK", 0.1)
    (client,) = clients_of(stand_in, timeout=0.25)
    keep_busy(stand_in, seconds=0.8, tokens=1)
    assert asyncio.run(client.generate({}))


def test_adapters_are_in_use_while_requests_are_in_flight(client: ServerClient, stand_in: StandIn) -> None:
    seen: list[set[str]] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        seen.append(client.adapters_in_use())
        return 200, {"choices": [choice([5])]}

    stand_in.answer = answer
    for version in range(3):
        client.model = f"policy-v{version}"
        asyncio.run(client.generate({}))
    assert seen == [{"policy-v0"}, {"policy-v1"}, {"policy-v2"}]
    assert client.adapters_in_use() == set()
    assert not client._running, "counts of old versions are dropped: a run has thousands"


def test_a_server_that_is_gone_is_reported_with_its_log(stand_in: StandIn, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    before = "RuntimeError: of the server that was here before\n"
    log.write_text(before + "(EngineCore pid=1) ERROR [core.py:1] MemoryError: no memory\n")
    client = ServerClient(Endpoint(stand_in.url, "key", "/nowhere", str(log), log_from=len(before)), timeout=5)
    stand_in.close()
    with pytest.raises(ServerGone, match=r"is gone .*MemoryError: no memory \(see .*vllm\.log\)") as caught:
        client.weight_version()
    assert client.lost is caught.value


def test_a_foreign_server_at_the_same_address_is_detected(stand_in: StandIn, client: ServerClient) -> None:
    """A foreign server is detected by its key or its weight version."""
    stand_in.answer = lambda path, body: (200, {"weight_version": ".3"})
    assert client.weight_version() == 3
    stand_in.answer = lambda path, body: (401, {"error": "Unauthorized"})
    with pytest.raises(ServerGone):
        client.pause()
    client = client.replaced_by(client.endpoint)
    labels = {"weight_versions": [{"version": ".4", "start": 0, "end": 1}]}
    stand_in.answer = lambda path, body: (200, {"choices": [choice([5]) | labels]})
    asyncio.run(client.generate({}))
    labels["weight_versions"][0]["version"] = "default"
    with pytest.raises(ServerGone, match="was started again"):
        asyncio.run(client.generate({}))
    assert client.lost


def test_weights_of_another_run_are_refused(stand_in: StandIn) -> None:
    """Two runs that sync to one server would each find their own version after each sync."""
    ours = ServerClient(Endpoint(stand_in.url, "key", "/nowhere"), 30, run="ours")
    version = "theirs.8"
    labels = [{"start": 0, "end": 1}]

    def answer(path: str, body: Any) -> tuple[int, Any]:
        labels[0]["version"] = version  # type: ignore[assignment]
        return 200, {"weight_version": version, "choices": [choice([5], weight_versions=labels)]}

    stand_in.answer = answer
    assert ours.weight_version() == "theirs.8", "of an earlier run, until the first sync"
    version = "ours.1"
    assert ours.weight_version() == 1
    (made,) = asyncio.run(ours.generate({}))
    assert made["weight_versions"][0]["version"] == 1
    version = "theirs.1"
    for call in (ours.weight_version, lambda: asyncio.run(ours.generate({}))):
        with pytest.raises(EngineError, match=r"another run has changed the weights of .* for one run at a time"):
            call()
    assert ours.lost is None


@pytest.mark.parametrize("answer", [{}, "no", b"not JSON"])
def test_an_unreadable_answer_is_an_error(stand_in: StandIn, client: ServerClient, answer: Any) -> None:
    stand_in.answer = lambda path, body: (200, answer)
    for call in (client.weight_version, client.world_size, client.adapters, lambda: client.score([1, 2])):
        with pytest.raises(EngineError, match=rf"^the answer to /.* at {stand_in.url} is not from a vLLM server"):
            call()


def test_seeds_of_neighbouring_prompts_do_not_overlap() -> None:
    """The i-th of n completions gets seed + i on the server."""
    used = sorted(spread_seed(seed) for seed in range(2000))
    assert min(b - a for a, b in pairwise(used)) > 10_000
    assert used[0] >= 0
    assert used[-1] < 2**62


def fails_at_first(stand_in: StandIn, status: int, times: float) -> Counter[str]:
    """A server answers `status` to the first `times` calls of each path, then normally. Returns the calls."""
    calls = Counter[str]()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        path = path.partition("?")[0]
        calls[path] += path != "/health"
        if 0 < calls[path] <= times:
            return status, {"error": {"message": "later"}}
        return 200, {"choices": [choice([5])], "weight_version": ".3", "success": True}

    stand_in.answer = answer
    return calls


@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_a_request_during_a_pause_waits_for_its_end(stand_in: StandIn, patience: float, caplog: Any) -> None:
    """vLLM 0.32 holds it; 0.33 refuses it, also one of the run's own servers, whose errors are not retried."""
    tries = Counter[str]()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        tries[path] += 1
        if path == GENERATE and tries[path] <= 2:
            return 503, {"error": {"message": "Generation is paused. Please retry after it resumes.", "code": 503}}
        return 200, {"choices": [choice([5])], "prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}

    stand_in.answer = answer
    client = ServerClient(Endpoint(stand_in.url, "key", "/nowhere"), 30, patience=patience)
    assert generate(client, 1, max_tokens=1)[0][0].token_ids == [5]
    tries.clear()
    assert client.score([1, 7]) == [-1.0]
    assert tries == {GENERATE: 3}
    assert client.lost is None
    assert not caplog.records


@pytest.fixture
def patient(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> ServerClient:
    monkeypatch.setattr(vllm_client, "FIRST_DELAY", 0.01)
    return ServerClient(Endpoint(stand_in.url, "key", "/nowhere"), 30, patience=20)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_to_a_failing_external_server_is_retried(
    stand_in: StandIn, patient: ServerClient, status: int
) -> None:
    calls = fails_at_first(stand_in, status, times=2)
    assert generate(patient, 1, max_tokens=1)[0][0].token_ids == [5]
    patient.pause()
    assert patient.weight_version() == 3
    patient.reset_prefix_cache()
    patient.set_version(4)
    patient.resume()
    assert {*calls.values()} - {0} == {3}
    assert patient.lost is None


def test_a_server_that_keeps_failing_ends_the_run_with_a_checkpoint(stand_in: StandIn, patient: ServerClient) -> None:
    """Reconnecting does not help: its checks use few routes of the server."""
    patient.patience = 0.05
    fails_at_first(stand_in, 429, times=math.inf)
    with pytest.raises(EngineGone, match=r"generate \(429\): later, for 0\.05 s .*; gave up after"):
        generate(patient, 3, max_tokens=1)


def test_an_update_of_weights_is_not_retried_alone(stand_in: StandIn, patient: ServerClient) -> None:
    """The server may have applied it, so the whole sync starts again, as for a new server."""
    calls = fails_at_first(stand_in, 503, times=1)
    given = {"update": ({},), "finish_update": (1,), "init_transfer": ({},)}
    given |= {"load_adapter": ("a", Path("/a")), "unload_adapter": ("a",)}
    for method, arguments in given.items():
        with pytest.raises(ServerGone, match=r"\(503\): later$"):
            getattr(patient, method)(*arguments)
        assert patient.lost
        patient = patient.replaced_by(patient.endpoint)
    assert {*calls.values()} - {0} == {1}
