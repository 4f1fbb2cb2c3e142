"""Whole runs with model.lora: they learn, resume exactly, spread over processes, and leave a plain model."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import pytest
import torch
from cli.running import SMALL, finish, metrics, start, without_times
from cli.test_survival import EVEN, wait_for
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LORA = ["train", *SMALL, *EVEN, "model.lora.rank=4", "train.steps=8", "checkpoint.every=2", "eval.problems=0"]
KINDS = {"still": [], "moving": ["algorithm.kl.sync_every=3", "algorithm.kl.sync_alpha=0.4"]}
"""What the KL term pulls towards: the base model, or TR-DPO's mixture."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, Path]:
    """A run of each kind that nothing happens to."""
    runs = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in KINDS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        for kind, run in runs.items():
            code, out = finish(start(*LORA, *KINDS[kind], f"hydra.run.dir={run}"))
            assert code == 0, out
    return runs


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(input_ids=torch.tensor([[2, 5, 55, 60, 51, 3, 6]])).logits


def base_of(run: Path) -> Path:
    config = json.loads((run / "checkpoints" / "step_000008" / "adapter_config.json").read_text())
    return Path(config["base_model_name_or_path"])


def test_it_trains_the_updates_and_leaves_a_plain_model(undisturbed: dict[str, Path]) -> None:
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
    """Mixed twice, after steps 3 and 6; the kl of step 4 is lower for it."""
    run = undisturbed["moving"]
    last = run / "checkpoints" / "step_000008"
    base, reference = (load_file(f / "model.safetensors") for f in (base_of(run), last / "reference"))
    assert {n for n in base if not base[n].equal(reference[n])} == {n for n in base if n.endswith("_proj.weight")}
    moving, still = metrics(run), metrics(undisturbed["still"])
    assert without_times(moving[:3]) == without_times(still[:3])
    assert moving[3]["kl"] < still[3]["kl"]


@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_then_resume(kind: str, undisturbed: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LORA, *KINDS[kind], f"hydra.run.dir={run}")
    wait_for(run / "checkpoints" / "step_000002")
    process.kill()
    finish(process)
    assert not (run / "summary.json").exists()
    code, out = finish(start("train", f"resume={run}"))
    assert code == 0, out
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    assert without_times(metrics(run)) == without_times(metrics(undisturbed[kind]))
    for name in ("model/model.safetensors", "checkpoints/step_000008/adapter_model.safetensors"):
        one, two = (load_file(folder / name) for folder in (run, undisturbed[kind]))
        assert one.keys() == two.keys()
        assert all(one[key].equal(two[key]) for key in one)


def test_two_processes_that_shard_do_what_one_does(undisturbed: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["hardware.processes=2", "hardware.parallel=fsdp2", "hardware.timeout=120", "train.steps=4"]
    code, out = finish(start(*LORA, *options, f"hydra.run.dir={run}"))
    assert code == 0, out
    for two, one in zip(metrics(run), metrics(undisturbed["still"])[:4], strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy", "tokens/trained"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_a_stopped_run_goes_on_only_with_the_same_updates(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*LORA, "train.steps=500", f"hydra.run.dir={run}")
    wait_for(run / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 3, out
    for rank in (8, 0):
        code, out = finish(start("train", f"resume={run}", f"model.lora.rank={rank}"))
        assert code == 2, out
        assert f"model.lora.rank={rank}: the run so far has 4" in out
    code, out = finish(start("train", f"resume={run}", f"train.steps={len(metrics(run)) + 1}"))
    assert code == 0, out


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_vllm_server_samples_with_the_adapter(tmp_path: Path) -> None:
    """Each sync sends as much as the updates are, and no more."""
    run = tmp_path / "run"
    options = ["engine=vllm", "model.dtype=float32", "train.steps=4", "optim.lr=0.01", "sync.tolerance=1e-4"]
    code, out = finish(start(*LORA, *options, f"hydra.run.dir={run}"))
    assert code == 0, out
    rows = metrics(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["kl"] > 1e-3, "the updates matter"
    assert all(row["token_mult_prob_error"] < 1.01 for row in rows)
    updates = load_file(run / "checkpoints" / "step_000004" / "adapter_model.safetensors")
    assert {row["sync/bytes"] for row in rows} == {sum(tensor.nbytes for tensor in updates.values())}
