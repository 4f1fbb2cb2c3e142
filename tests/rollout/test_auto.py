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


@pytest.mark.parametrize(
    ("options", "gpus", "engine", "noted"),
    [
        # a short run is sampled before vLLM would be ready
        ([], 1, Transformers, True),
        (LONG, 1, Vllm, False),
        ([*LONG, "algorithm=sft", "task=gsm8k", "eval.problems=0"], 1, Transformers, True),
        (["train.steps=1", "eval.problems=10000", "rollout.max_completion_tokens=512"], 1, Vllm, False),
        # only one engine can sample
        ([], 0, Transformers, False),
        ([], 2, Vllm, False),
        (["rollout.max_staleness=1"], 1, Vllm, False),
        (["rollout.regex=a+", "algorithm/correction=token_truncate"], 1, Vllm, False),
    ],
)
def test_the_engine_follows_from_the_run_and_the_machine(
    monkeypatch: pytest.MonkeyPatch, options: list[str], gpus: int, engine: type, noted: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: [str(number) for number in range(gpus)])
    run = build_run(compose(["engine=auto", *options]))
    assert isinstance(run.engine, AutoEngine)
    notes: list[str] = []
    assert type(run.engine.for_run(run, notes.append)) is engine
    assert "".join(notes).startswith("engine=auto chose transformers: ") == noted
