"""engine=vllm_colocate with real vLLM, in separate processes because vLLM changes global state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.vllm_tiny import TOKENIZER, build_model
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.vllm


def child(what: str, model: Path, folder: Path) -> Any:
    """Results of `colocate_child`."""
    run, results = folder / f"run_{what}", folder / f"{what}.json"
    command = [sys.executable, "-m", "rollout.colocate_child", what, str(model), str(run), str(results)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "vllm" in (run / "logs" / "vllm.log").read_text()
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("colocate")
    return child("engine", build_model(folder / "model", tied=True), folder)


@pytest.mark.parametrize("name", ["plain", "truncated"])
def test_log_probs_equal_those_of_transformers(found: Any, name: str) -> None:
    reasons = set()
    for one in found["sampled"][name]:
        assert one["logprobs"] == pytest.approx(one["expected"], abs=1e-3)
        ended = one["token_ids"][-1] == TOKENIZER.eos_token_id
        assert one["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(one["token_ids"]) == 24
        reasons.add(one["finish_reason"])
    assert name == "truncated" or reasons == {"stop", "length"}


def test_only_a_sync_changes_the_weights(found: Any) -> None:
    synced, size = found["synced"]
    assert synced == {"sync/bytes": size}
    before, trainer_before, between, trainer_between, after, trainer_after = found["moved"]["scores"]
    assert before == pytest.approx(trainer_before, abs=1e-4)
    assert between == before, "vLLM shares the trainer's tensors"
    assert max(abs(a - b) for a, b in zip(trainer_before, trainer_between, strict=True)) > 0.1
    assert after == pytest.approx(trainer_after, abs=1e-4)
    assert (found["moved"]["versions"], found["moved"]["weight version"]) == ([2], "2")
    assert "call sync before generate" in found["before the first sync"]


def test_wrong_weights_are_refused_with_both_numbers(found: Any) -> None:
    said, server, trainer = found["corrupted"]["wrong"]
    assert "does not have the trainer's weights" in said
    assert f"{server:.5f}" in said
    assert f"{trainer:.5f}" in said
    assert "does not have the trainer's weights" in found["corrupted"]["never arrives"][0]


def test_an_unknown_parameter_is_refused(found: Any) -> None:
    assert "could not load the weights" in found["corrupted"]["unknown"][0]


def test_an_unknown_argument_of_vllm_is_refused(found: Any) -> None:
    assert found["an unknown argument"].startswith("engine.vllm_args: ")
    assert "unexpected keyword argument 'max_num_seq'" in found["an unknown argument"]


def test_the_process_state_is_restored_after_every_call(found: Any) -> None:
    assert found["changed by start"] == {}
    assert found["changed by use"] == {}
    assert found["changed in the end"] == {}


@pytest.mark.survival
def test_vllms_logits_are_as_exact_as_the_trainers(tmp_path: Path) -> None:
    """Only the model's head rounds: its layers add nothing, its weights are exact in bfloat16, its logits large."""
    model = build_model(tmp_path / "model", tied=False)
    wide = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            weight.mul_(0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            weight.copy_((4 * weight if "lm_head" in name else weight).bfloat16())
    wide.save_pretrained(model)
    gaps = child("heads", model, tmp_path)
    assert gaps["float32"]["float32"] < gaps["float32"]["None"] / 5, "the trainer alone rounds"
    assert gaps["float32"]["float32"] < gaps["None"]["float32"] / 5, "vLLM alone rounds"
