"""engine=vllm_colocate with a stand-in for `vllm.LLM`: arguments and the order of calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from rollout.vllm_tiny import TOKENIZER, Alone, TinyPolicy, build_model

from grpocli.errors import ConfigError, EngineError
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm import colocate
from grpocli.rollout.vllm.colocate import ColocateEngine, InProcessLLM, VllmState
from grpocli.rollout.vllm.engine_parts import VllmColocate
from grpocli.types import Request, Sampling


class Recorded:
    """A `vllm.LLM` that records calls and the largest number of live tensors."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.alive = 0

    def wake_up(self, tags: Sequence[str] = ("all",)) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def update_weights(self, request: dict[str, Any]) -> None:
        seen: list[Any] = []
        for _, tensor in request["update_info"]["weights"]:
            seen.append(weakref.ref(tensor))
            self.alive = max(self.alive, sum(one() is not None for one in seen))
            del tensor
        self.calls.append("update")

    def __getattr__(self, name: str) -> Any:
        if name not in ("start_weight_update", "finish_weight_update", "reset_prefix_cache"):
            raise AttributeError(name)
        return lambda **_: self.calls.append(name.partition("_")[0]) or True


class Sampling1(InProcessLLM):
    """An engine with scripted completions and scores."""

    policy: TinyPolicy

    def complete(self, prompts: Any, parameters: Any) -> Any:
        self.llm.calls.append("generate")
        choice = {"token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
        return [[choice | {"index": 0}] for _ in prompts]

    def score(self, token_ids: Any) -> list[float]:
        self.llm.calls.append("probe")
        return self.policy.score(token_ids)


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[ColocateEngine, Recorded]:
    policy = TinyPolicy(build_model(tmp_path / "model", tied=True))
    llm = Recorded()
    server = Sampling1(llm, VllmState(), torch.float32, can_sleep=True, log=tmp_path / "log")
    server.policy = policy
    job = EngineJob(str(tmp_path / "model"), "float32", 128, tmp_path, seed=0)
    return ColocateEngine(server, EngineContext(job, policy, TOKENIZER, Alone())), llm  # type: ignore[arg-type]


LOAD = ["start", "update", "finish"]
AWAKE = ["wake weights", *LOAD, "wake kv_cache", "reset"]


def test_it_sleeps_while_the_trainer_trains(recorded: tuple[ColocateEngine, Recorded]) -> None:
    engine, llm = recorded
    ask = [Request([5, 6], 1, seed=0)]
    engine.sync(1)
    engine.generate(ask, Sampling(4))
    engine.generate(ask, Sampling(4))  # a refill, or the next turn: awake, with its prefix cache
    engine.release_memory()
    assert llm.calls == [*LOAD, "reset", "probe", "generate", "generate", "sleep 2"]
    llm.calls.clear()
    engine.sync(2)
    engine.generate(ask, Sampling(4))
    engine.release_memory()
    engine.release_memory()
    assert llm.calls == [*AWAKE, "probe", "generate", "sleep 2"]


def test_parameters_are_sent_one_at_a_time(recorded: tuple[ColocateEngine, Recorded]) -> None:
    engine, llm = recorded
    engine.llm.dtype = torch.bfloat16  # casting makes a copy, whose lifetime is measured
    gc.disable()
    try:
        engine.llm.load(engine.weights.stream(), 1)
    finally:
        gc.enable()
    assert llm.alive == 1


def test_a_failure_in_any_process_stops_all(recorded: tuple[ColocateEngine, Recorded]) -> None:
    engine, _ = recorded
    engine.world.gather_objects = lambda items: [*items, EngineError("the other process could not")]  # type: ignore
    with pytest.raises(EngineError, match="the other process could not"):
        engine.sync(1)
    assert engine.version is None


def test_vllm_and_the_trainer_keep_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes a stream of its own the current one, and leaves it there."""
    streams = Mock()
    current = [streams.trainers]
    monkeypatch.setattr(colocate, "keep_random_state", nullcontext)  # reads the generator of the GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    state = VllmState()
    with state.active():
        torch.cuda.set_stream(streams.vllms)
    assert current[-1] is streams.trainers
    with suppress(EngineError), state.active():
        assert current[-1] is streams.vllms
        raise EngineError("failed")
    assert current[-1] is streams.trainers
    trainer_waits, vllm_waits = call.trainers.wait_stream(streams.vllms), call.vllms.wait_stream(streams.trainers)
    assert streams.mock_calls == [trainer_waits, vllm_waits, trainer_waits]


def test_too_little_room_is_refused_before_a_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=20"):
        VllmColocate(max_model_len=20).launch(EngineJob("model", "float32", 40, tmp_path, seed=0))
