"""Whole runs with model.lora: learning, exact resume, several processes, and a plain final model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli.running import EVEN, SMALL, assert_close_metrics, assert_resumes_exactly, metrics, run_here, without_times
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.processes

LORA = ["train", *SMALL, *EVEN, "model.lora.rank=4", "train.steps=8", "checkpoint.every=2", "checkpoint.keep=0"]
LORA += ["eval.problems=0"]
ADAPTER = "checkpoints/step_000008/adapter_model.safetensors"
KINDS = {"still": [], "moving": ["algorithm.kl.sync_every=3", "algorithm.kl.sync_alpha=0.4"]}
"""The kinds of reference: the base model, or TR-DPO's mixture."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An uninterrupted run of each kind."""
    runs = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in KINDS}
    for kind, run in runs.items():
        assert run_here(*LORA, *KINDS[kind], f"hydra.run.dir={run}") == 0
    return runs


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(input_ids=torch.tensor([[2, 5, 55, 60, 51, 3, 6]])).logits


def base_of(run: Path) -> Path:
    config = json.loads((run / "checkpoints" / "step_000008" / "adapter_config.json").read_text())
    return Path(config["base_model_name_or_path"])


def test_only_the_adapter_is_trained_and_the_final_model_is_plain(undisturbed: dict[str, Path]) -> None:
    run = undisturbed["still"]
    rows = metrics(run)
    assert rows[0]["kl"] == 0, "the first policy is the reference"
    assert all(row["kl"] > 0 for row in rows[1:])
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["token_mult_prob_error"] == pytest.approx(1, abs=1e-4) for row in rows)
    base, final = (load_file(folder / "model.safetensors") for folder in (base_of(run), run / "model"))
    assert base.keys() == final.keys()
    changed = {name for name in base if not base[name].equal(final[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    last = run / "checkpoints" / "step_000008"
    assert not (last / "model.safetensors").exists()
    assert not (last / "reference").exists()
    torch.testing.assert_close(logits(run / "model"), logits(last), rtol=0, atol=1e-4)
    assert (logits(last) - logits(base_of(run))).abs().max() > 1e-2


def test_a_moving_reference_is_saved_whole(undisturbed: dict[str, Path]) -> None:
    """It is mixed after steps 3 and 6, so the KL of step 4 is lower."""
    run = undisturbed["moving"]
    last = run / "checkpoints" / "step_000008"
    base, reference = (load_file(f / "model.safetensors") for f in (base_of(run), last / "reference"))
    assert {n for n in base if not base[n].equal(reference[n])} == {n for n in base if n.endswith("_proj.weight")}
    moving, still = metrics(run), metrics(undisturbed["still"])
    assert without_times(moving[:3]) == without_times(still[:3])
    assert moving[3]["kl"] < still[3]["kl"]


def test_a_resume_equals_never_having_stopped(undisturbed: dict[str, Path], tmp_path: Path) -> None:
    """Also with a reference that moves, which a checkpoint holds, too."""
    assert_resumes_exactly(undisturbed["moving"], 4, tmp_path / "run", files=[ADAPTER])


def test_a_resume_of_a_second_stage_needs_no_first_one(undisturbed: dict[str, Path], tmp_path: Path) -> None:
    """The reference has the adapter that the stage began with, and not the one that it trains."""
    first, run = tmp_path / "first", tmp_path / "run"
    shutil.copytree(undisturbed["still"] / "checkpoints" / "step_000002", first)
    assert run_here(*LORA, f"model.lora.path={first}", f"hydra.run.dir={run}") == 0
    shutil.rmtree(first)
    assert_resumes_exactly(run, 4, tmp_path / "again", files=[ADAPTER])
    assert metrics(run)[0]["kl"] == 0
    assert metrics(run)[4]["kl"] > 0


@pytest.mark.survival
def test_two_sharded_processes_equal_one(undisturbed: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["hardware.processes=2", "hardware.parallel=fsdp2", "hardware.timeout=120", "train.steps=4"]
    assert run_here(*LORA, *options, f"hydra.run.dir={run}") == 0
    assert_close_metrics(metrics(run), metrics(undisturbed["still"])[:4], rel=1e-3)


@pytest.mark.survival
@pytest.mark.vllm
def test_a_vllm_server_samples_with_the_adapter(tmp_path: Path) -> None:
    """Each sync sends only the adapter."""
    run = tmp_path / "run"
    options = ["engine=vllm", "model.dtype=float32", "train.steps=4", "optim.lr=0.01", "sync.tolerance=1e-4"]
    assert run_here(*LORA, *options, f"hydra.run.dir={run}") == 0
    rows = metrics(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["kl"] > 1e-3, "the updates matter"
    assert all(row["token_mult_prob_error"] < 1.01 for row in rows)
    updates = load_file(run / "checkpoints" / "step_000004" / "adapter_model.safetensors")
    assert {row["sync/bytes"] for row in rows} == {sum(tensor.nbytes for tensor in updates.values())}
