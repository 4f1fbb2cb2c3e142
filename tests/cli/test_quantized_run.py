"""Whole runs with model.quantization=nf4 and optim=adamw_8bit: an exact resume, a plain final model, real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli.running import EVEN, SMALL, assert_resumes_exactly, metrics, run_here
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.processes

QLORA = ["train", *SMALL, *EVEN, "model.quantization=nf4", "model.lora.rank=4", "optim=adamw_8bit", "eval.problems=0"]
QLORA += ["optim.lr=5e-3", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=0"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("qlora") / "run"
    assert run_here(*QLORA, f"hydra.run.dir={run}") == 0
    return run


def test_a_resume_equals_never_having_stopped(undisturbed: Path, tmp_path: Path) -> None:
    files = [f"checkpoints/step_000004/{name}.safetensors" for name in ("adapter_model", "optimizer-00001")]
    assert_resumes_exactly(undisturbed, 2, tmp_path / "run", files=files)


def test_sampler_and_trainer_are_one_model_and_the_final_model_is_plain(undisturbed: Path) -> None:
    rows = metrics(undisturbed)
    assert rows[0]["kl"] == 0, "the quantized base is the reference"
    assert rows[-1]["kl"] > 0
    assert all(row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) for row in rows)
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.vllm
@pytest.mark.survival
def test_vllm_serves_the_numbers_that_four_bits_stand_for(tmp_path: Path) -> None:
    """The first sync compares the base models, and a canary adapter must be followed."""
    run = tmp_path / "run"
    options = ["engine=vllm", "engine.cpu_kv_cache_gb=1", "train.steps=2"]
    assert run_here(*QLORA, *options, f"hydra.run.dir={run}") == 0
    rows = metrics(run)
    assert all(row["token_mult_prob_error"] == pytest.approx(1, abs=1e-3) for row in rows)
    assert rows[0]["sync/seconds/canary"] > 0
