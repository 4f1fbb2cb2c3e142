"""model.head_dtype with real vLLM in bfloat16, from a server and in the trainer's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.vllm_tiny import build_model
from transformers import LlamaForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.survival]

Measure = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """The results of `head_child` for an engine and a head.

    In the model only the head rounds: its layers add nothing, its weights are exact in bfloat16, its logits large.
    """
    folder = tmp_path_factory.mktemp("head")
    model, known = build_model(folder / "model", tied=False), dict[tuple[str, str], Any]()
    wide = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            weight.mul_(0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            weight.copy_((4 * weight if "lm_head" in name else weight).bfloat16())
    wide.save_pretrained(model)

    def found(engine: str, head: str) -> dict[str, Any]:
        if (engine, head) not in known:
            results = folder / f"{engine}_{head}.json"
            words = [engine, head, str(model), str(folder / f"run_{engine}_{head}"), str(results)]
            env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "2"}
            command = [sys.executable, "-m", "rollout.head_child", *words]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, done.stderr
            known[engine, head] = json.loads(results.read_text())
        return known[engine, head]

    return found


@pytest.mark.parametrize("engine", ["vllm", "vllm_colocate"])
def test_vllms_logits_are_as_exact_as_the_trainers(measure: Measure, engine: str) -> None:
    wide = measure(engine, "float32")
    assert wide["float32"] < wide["null"] / 5, "the trainer alone rounds"
    assert wide["float32"] < measure("vllm", "null")["float32"] / 5, "vLLM alone rounds"


def test_a_server_describes_its_head(measure: Measure) -> None:
    wide, narrow = (measure("vllm", head)["misfit"] for head in ("float32", "null"))
    assert (wide["float32"], narrow["None"]) == ("", "")
    assert "another model.head_dtype than the run, float32 instead of model" in wide["None"]
    assert "another model.head_dtype than the run, model instead of float32" in narrow["float32"]
