"""model.head_dtype with real vLLM in bfloat16, in the trainer's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rollout.vllm_tiny import build_model
from transformers import LlamaForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.survival]


def test_vllms_logits_are_as_exact_as_the_trainers(tmp_path: Path) -> None:
    """Only the model's head rounds: its layers add nothing, its weights are exact in bfloat16, its logits large."""
    model = build_model(tmp_path / "model", tied=False)
    wide = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            weight.mul_(0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            weight.copy_((4 * weight if "lm_head" in name else weight).bfloat16())
    wide.save_pretrained(model)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    gaps = {}
    for head in ("float32", "null"):
        words = [head, str(model), str(tmp_path / f"run_{head}"), str(tmp_path / f"{head}.json")]
        command = [sys.executable, "-m", "rollout.head_child", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        gaps[head] = json.loads((tmp_path / f"{head}.json").read_text())
    assert gaps["float32"]["float32"] < gaps["float32"]["null"] / 5, "the trainer alone rounds"
    assert gaps["float32"]["float32"] < gaps["null"]["float32"] / 5, "vLLM alone rounds"
