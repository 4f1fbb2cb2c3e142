"""Training in float16: a scaled loss has the unscaled gradient, and an update that overflows changes only the scale."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli.running import EVEN, SMALL, assert_same_run, killed_after, metrics, run_here
from training import test_update
from training.test_optim import OPTIMIZERS
from training.updating import copies, updater_for

from grpocli.config.schema import Rollouts
from grpocli.distributed import parallel
from grpocli.distributed.parallel import Parallel, loss_scaler, step
from grpocli.distributed.world import World
from grpocli.errors import RunError
from grpocli.models import loading
from grpocli.models import shared_prompt_attention as shared
from grpocli.models.loading import HuggingFace
from grpocli.runs.run_dir import RunDir
from grpocli.training.optim import AdamW, make_optimizer
from grpocli.training.update import SCALE, SKIPPED, UpdateChecks, Updater
from grpocli.types import Row

CPU = torch.device("cpu")
rows = test_update.rows


def in_float16(little_model: Any, world: World, scale: float, **train: int) -> Updater:
    up = updater_for(little_model, world, "algorithm=dapo", **train)
    up.policy.dtype = torch.float16
    up.policy.parallel = Parallel(CPU)
    up.policy.parallel.scaler = loss_scaler(CPU, torch.float16)
    up.policy.parallel.scaler.load_state_dict(up.policy.parallel.scaler.state_dict() | {"scale": scale})
    return up


def gradient(up: Updater, given: list[Row]) -> torch.Tensor:
    """The unscaled gradient of a step's only window."""
    (window,) = up.begin_step(copies(given), 2, 1)
    up.accumulate(window)
    up.policy.parallel.scaler.unscale_(up.optimizer)
    return torch.cat([p.grad.flatten() for p in up.policy.model.parameters()])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative difference."""
    return float((one - other).norm() / other.norm())


def test_a_scaled_loss_gives_the_unscaled_gradient(little_model, world, rows) -> None:
    unscaled = gradient(in_float16(little_model, world, 1.0), rows)
    for scale in (2.0**8, 2.0**16):
        assert apart(gradient(in_float16(little_model, world, scale), rows), unscaled) <= 1e-3
    in_float32 = gradient(updater_for(little_model, world, "algorithm=dapo"), rows)
    assert 0 < apart(unscaled, in_float32) <= 0.02


def test_gradients_below_the_range_of_float16_are_not_lost(little_model, world, rows) -> None:
    """Advantages of 1e-6 leave gradients that float16 rounds to 0 without a scale."""
    for row in (rows := [copy.copy(row) for row in rows]):
        row.advantage *= 1e-6
    expected = gradient(updater_for(little_model, world, "algorithm=dapo"), rows)
    assert apart(gradient(in_float16(little_model, world, 2.0**16), rows), expected) <= 0.02
    assert apart(gradient(in_float16(little_model, world, 1.0), rows), expected) > 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_skips_an_update_that_overflows(little_model, name: str) -> None:
    """After it, the next update is that of a run without it."""
    weights = {}
    for overflows in (False, True):
        model = copy.deepcopy(little_model)
        optimizer, scaler = make_optimizer(OPTIMIZERS[name], model), loss_scaler(CPU, torch.float16)
        for number in range(3):
            scaler.scale(torch.ones(()))
            if number == 1 and not overflows:
                continue
            for i, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * number + i)
                parameter.grad = torch.randn(parameter.shape, generator=generator) * scaler.get_scale()
            if number == 1:
                next(model.parameters()).grad[0, 0] = torch.inf
            norm = step(model, optimizer, 0.01, 1.0, scaler)
            assert bool(norm.isfinite()) == (number != 1)
            assert all(parameter.grad is None for parameter in model.parameters())
        assert scaler.get_scale() == 2.0**16 / (2 if overflows else 1)
        weights[overflows] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert weights[True].equal(weights[False])


RUN = [*SMALL, *EVEN, "model.dtype=float16", "checkpoint.every=1", "checkpoint.keep=0", "train.steps=4"]


def test_a_run_skips_updates_says_so_once_and_resumes_to_the_bit(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(parallel, "FIRST_SCALE", 2.0**30)
    monkeypatch.setattr(parallel, "GOOD_UPDATES", 2)
    overrides = [*RUN, "train.epochs=4", "optim.lr=1e-4"]
    whole = tmp_path / "whole"
    assert run_here("train", *overrides, f"hydra.run.dir={whole}") == 0
    assert capsys.readouterr().out.count("overflowed float16") == 1
    steps = metrics(whole)
    skipped = [one[SKIPPED] for one in steps]
    assert skipped[0] == 4, "every update of the first step"
    assert skipped[-1] < 4, "some of the last"
    assert ["grad_norm" in one for one in steps] == [n < 4 for n in skipped]
    resumed = killed_after(2, whole, tmp_path / "killed")
    assert run_here("train", f"resume={resumed}") == 0
    assert_same_run(resumed, whole)


def test_a_scale_below_one_ends_the_run(world, tmp_path: Path) -> None:
    run = SimpleNamespace(optim=AdamW(), rollout=Rollouts())
    checks = UpdateChecks(run, RunDir(tmp_path), None, world)  # type: ignore[arg-type]
    said = r"step 3: gradients overflow float16 even without a scale.*model\.dtype=bfloat16"
    with pytest.raises(RunError, match=said):
        checks.check_loss(3, {SCALE: 0.5, SKIPPED: 1, "loss": 0.1})
    checks.check_loss(3, {SCALE: 1.0, SKIPPED: 1, "loss": float("nan")})
    with pytest.raises(RunError, match="loss is nan"):
        checks.check_loss(3, {SCALE: 1.0, SKIPPED: 0, "loss": float("nan")})
    nan = {"token_mult_prob_error": float("nan")}
    checks.check_sampler(3, nan | {SKIPPED: 1})  # an overflow is not the engine's fault
    for found in (nan, nan | {SKIPPED: 0}, {"token_mult_prob_error": 11.0, SKIPPED: 1}):
        with pytest.raises(RunError, match="max_prob_error"):
            checks.check_sampler(3, found)


def test_norms_of_skipped_updates_are_not_counted(little_model, world, rows, monkeypatch: pytest.MonkeyPatch) -> None:
    up = in_float16(little_model, world, 1.0, epochs=3)
    norms = map(torch.tensor, (2.0, torch.inf, 4.0))
    monkeypatch.setattr(up.policy.parallel, "update", lambda *_: next(norms))
    found = up.train_step(copies(rows), 2, 1)
    assert (found["grad_norm"], found[SKIPPED]) == (3.0, 1)


@pytest.mark.parametrize(
    ("native", "kind", "expected"),
    [(True, "llama", "bfloat16"), (False, "llama", "float16"), (False, "gemma3_text", "float32")],
)
def test_a_gpu_without_bfloat16_computes_in_float16(
    native: bool, kind: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says that it supports bfloat16 there, because it emulates it. Gemma 3 overflows float16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert loading.choose_dtype("auto", HuggingFace(path=str(tmp_path)), str(tmp_path), "auto") == expected


@pytest.mark.parametrize(("capability", "groups"), [((7, 5), False), ((8, 0), True)])
def test_keys_are_repeated_on_a_gpu_without_a_flash_kernel(capability, groups: bool, monkeypatch) -> None:
    called: dict[str, Any] = {}

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
        called.update(how, heads=key.shape[1])
        return query

    class OnGpu(torch.Tensor):
        device = torch.device("cuda:0")
        is_cuda = True

    monkeypatch.setattr(shared, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    query, key = torch.zeros(1, 4, 3, 8).half().as_subclass(OnGpu), torch.zeros(1, 2, 3, 8).half()
    shared.gpu_sdpa(query, key, key, None, 2, {})
    assert (called["enable_gqa"], called["heads"]) == (groups, 2 if groups else 4)
