"""engine=auto on a machine with GPUs and vLLM: short runs on one GPU do not wait for vLLM."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from grpocli import hardware
from grpocli.composition.compose import build_run, compose
from grpocli.rollout.transformers_engine import AutoEngine, Transformers
from grpocli.rollout.vllm.engine_parts import Vllm

LONG = ["rollout.max_completion_tokens=256", "train.steps=500"]


def chosen(monkeypatch: pytest.MonkeyPatch, options: list[str], gpus: int = 1) -> tuple[type, str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: [str(number) for number in range(gpus)])
    run = build_run(compose(["engine=auto", *options]))
    assert isinstance(run.engine, AutoEngine)
    notes: list[str] = []
    engine = run.engine.for_run(run, notes.append)
    return type(engine), "".join(notes)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ([], Transformers),
        (["train.steps=5", "rollout.max_completion_tokens=128"], Transformers),
        (["algorithm=dapo"], Transformers),
        (LONG, Vllm),
        ([*LONG, "algorithm=sft", "task=gsm8k", "eval.problems=0"], Transformers),
        (["train.steps=1", "eval.problems=10000", "rollout.max_completion_tokens=512"], Vllm),
    ],
)
def test_a_short_run_is_sampled_before_vllm_would_be_ready(
    monkeypatch: pytest.MonkeyPatch, options: list[str], engine: type
) -> None:
    found, why = chosen(monkeypatch, options)
    assert found is engine
    assert why.startswith("engine=auto chose transformers: ") is (engine is Transformers)


@pytest.mark.parametrize(
    ("options", "gpus", "engine"),
    [
        ([], 0, Transformers),
        ([], 2, Vllm),
        (["hardware.rollout_devices=1"], 1, Vllm),
        (["rollout.max_staleness=1"], 1, Vllm),
        (["rollout.regex=a+", "algorithm/correction=token_truncate"], 1, Vllm),
    ],
)
def test_only_one_engine_can_sample(
    monkeypatch: pytest.MonkeyPatch, options: list[str], gpus: int, engine: type
) -> None:
    assert chosen(monkeypatch, options, gpus) == (engine, "")
