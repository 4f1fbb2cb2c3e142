"""Processes that share each micro-batch compute what a process alone does, and keep a part of the activations each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.architectures import architecture
from training import sharing, updating
from training.test_processes import assert_same, assert_same_scores, launched, rows, tied_model
from training.test_router_balance import ALONE, updated

from grpocli.composition.checks import check_splits
from grpocli.config.schema import Rollouts
from grpocli.distributed.world import World
from grpocli.errors import ConfigError
from grpocli.hardware import Single
from grpocli.models.loading import HuggingFace, load_config
from grpocli.types import Row

__all__ = ["rows", "tied_model"]

FAST = ["dapo", "top_entropy and bonus"]
MORE = [name for name in updating.ALGORITHMS if name not in (*FAST, "padded")]
SURVIVAL = [*MORE, *sharing.KINDS, sharing.RESUMED, sharing.TAUGHT, sharing.MIXTURE]


def test_a_model_whose_heads_cannot_be_dealt_out_is_refused(little_model, tmp_path: Path) -> None:
    little_model.save_pretrained(tmp_path)
    model, two = HuggingFace(path=str(tmp_path)), Single(context_parallel=2)
    run: Any = SimpleNamespace(hardware=two, model=model, rollout=Rollouts())
    check_splits(run, load_config(run.model, str(tmp_path)))
    run.hardware = Single(context_parallel=3)
    with pytest.raises(ConfigError, match=r"context_parallel=3: must divide the 2 attention heads of this model"):
        check_splits(run, load_config(run.model, str(tmp_path)))


class Shared:
    """Starts the two processes once for each list of algorithms."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}

    def results(self, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """The results of both processes, by `hardware.parallel`."""
        if (key := tuple(names)) not in self.ran:
            launched(sharing.__file__, 2, self.folder / f"logs_{len(self.ran)}", str(self.folder), *names)
            files = {kind: [self.folder / f"shared_{rank}_{kind}.pt" for rank in range(2)] for kind in updating.SHARED}
            self.ran[key] = {kind: [torch.load(file, weights_only=True) for file in files[kind]] for kind in files}
        return self.ran[key]


@pytest.fixture(scope="module")
def shared(tied_model, rows: list[Row], world: World, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("shared")
    tied_model.save_pretrained(folder / "model")
    updating.save_rows(rows, folder / "rows.json")
    updating.went_on(world, folder, folder / "model", folder / "saved_1")
    return Shared(folder)


NAMES = [*FAST, *(pytest.param(name, marks=pytest.mark.survival) for name in MORE)]


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_processes_that_share_micro_batches_make_the_updates_of_one(shared: Shared, world: World, name: str) -> None:
    """Losses, metrics, weights and the log-probs of every row, with ddp and with fsdp2."""
    alone = updating.descended(world, shared.folder, name)
    tolerance = 0.02 if name in updating.IN_16_BITS else 1e-5
    for parallel, results in shared.results(FAST if name in FAST else SURVIVAL).items():
        for rank, result in enumerate(results):
            assert_same(result[name], alone, tolerance, (parallel, rank))
        assert_same_scores(results[0][name]["scored"], alone["scored"], name)


@pytest.mark.processes
def test_each_process_keeps_about_half_of_the_activations(shared: Shared) -> None:
    for result in shared.results(FAST)["ddp"]:
        assert result["bytes"]["shared"] <= 0.6 * result["bytes"]["whole"]


@pytest.mark.processes
@pytest.mark.survival
def test_the_balance_of_experts_counts_the_tokens_of_all_processes(shared: Shared, world: World) -> None:
    gradient, metrics = updated(architecture("qwen3_moe").build(), world, *ALONE, packed=True, tokens=120)
    parts = [result[sharing.MIXTURE] for result in shared.results(SURVIVAL)["ddp"]]
    found = sum(part[0] for part in parts) / len(parts)  # ddp averages gradients, and here nothing wraps the model
    assert (found - gradient).norm() <= 2e-5 * gradient.norm()
    for part in parts:
        assert part[1]["router/aux_loss"] == pytest.approx(metrics["router/aux_loss"], rel=1e-5)
        assert part[1]["router/max_load"] == pytest.approx(metrics["router/max_load"], rel=1e-6)


@pytest.mark.processes
@pytest.mark.survival
@pytest.mark.parametrize("kind", [*sharing.KINDS, sharing.RESUMED, sharing.TAUGHT])
def test_kernels_checkpoints_and_teachers_are_those_of_a_process_alone(shared: Shared, world: World, kind: str) -> None:
    """A checkpoint of one process is resumed."""
    folder = shared.folder
    if kind == sharing.RESUMED:
        alone = updating.went_on(world, folder, folder / "saved_1", folder / "saved_1_to_1")
    else:
        alone = sharing.taught(world, folder) if kind == sharing.TAUGHT else updating.descended(world, folder, "grpo")
    for parallel, results in shared.results(SURVIVAL).items():
        for rank, result in enumerate(results):
            assert_same(result[kind], alone, 1e-5, (parallel, rank))
