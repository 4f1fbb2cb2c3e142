"""Processes that share each micro-batch compute what a process alone does, and keep a part of the activations each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.architectures import architecture
from training import sharing, updating
from training.test_processes import assert_same, launched, rows, tied_model
from training.test_router_balance import ALONE, updated

from grpocli.composition.checks import check_splits
from grpocli.config.schema import Rollouts
from grpocli.distributed.context_parallel import ContextParallel
from grpocli.distributed.world import World
from grpocli.errors import ConfigError
from grpocli.hardware import Single
from grpocli.models import shared_prompt_attention as attention
from grpocli.models.loading import HuggingFace, load_config
from grpocli.training.packing import MicroBatch, Packed, shards_of
from grpocli.training.policy import Policy
from grpocli.types import Row, Sampling

__all__ = ["rows", "tied_model"]

FAST = ["dapo", "top_entropy and bonus"]
MORE = [name for name in updating.ALGORITHMS if name not in (*FAST, "padded")]
SURVIVAL = [*MORE, *sharing.KINDS, sharing.RESUMED, sharing.TAUGHT, sharing.MIXTURE]


class Alone(ContextParallel):
    """A process among others whose messages the test makes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def some_rows() -> list[Row]:
    lengths = {0: (5, 9, 4), 1: (1, 13), 2: (7,)}
    return [
        Row([2, *range(5, 9 + 3 * group)], list(range(10, 10 + n)), [1] * n, 1.0, group, [-1.0] * n)
        for group, each in lengths.items()
        for n in each
    ]


@pytest.mark.parametrize("size", [2, 7])
def test_every_token_and_every_target_belongs_to_one_process(size: int) -> None:
    whole = Packed.build(some_rows(), torch.device("cpu"))
    shards = [shards_of(Alone(rank, size), Packed).build(some_rows(), torch.device("cpu")) for rank in range(size)]
    ids_L = torch.stack([shard.input_ids[0] for shard in shards], 1).flatten()
    assert torch.equal(ids_L[: whole.input_ids.shape[1]], whole.input_ids[0])
    assert len({shard.input_ids.shape for shard in shards}) == 1, "equal parts"
    target_C = torch.cat([shard.target_C for shard in shards])
    assert target_C.sort().values.tolist() == list(range(len(whole.index_C)))
    predicted = whole.keep_U[whole.predictor_N]
    for rank, shard in enumerate(shards):
        places = shard.keep_U[shard.predictor_N[: len(shard.target_C)]] * size + rank
        assert torch.equal(places, predicted[shard.target_C])


class Counting(Alone):
    """Counts sums; the others send what it sends itself."""

    sums = 0

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return part

    def _exchanged(self, sent: torch.Tensor) -> torch.Tensor:
        return sent


def test_a_micro_batch_takes_one_sum_over_its_processes(little_model) -> None:
    """Log-probs, entropies and the most probable tokens travel together."""
    model, processes = copy.deepcopy(little_model), Counting(0, 2)
    assert attention.enable(model, 64)
    policy = Policy(model, model, torch.float32)
    batch = MicroBatch.build(some_rows(), torch.device("cpu"), shards_of(processes, Packed))
    scores = policy.scores(batch, Sampling(20))
    assert {one.shape for one in scores} == {batch.mask.shape}
    assert processes.sums == 1


def test_a_model_whose_heads_cannot_be_dealt_out_is_refused(little_model, tmp_path: Path) -> None:
    little_model.save_pretrained(tmp_path)
    run: Any = SimpleNamespace(
        hardware=Single(context_parallel=2), model=HuggingFace(path=str(tmp_path)), rollout=Rollouts()
    )
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
            self.ran[key] = {
                parallel: [
                    torch.load(self.folder / f"shared_{rank}_{parallel}.pt", weights_only=True) for rank in range(2)
                ]
                for parallel in ("ddp", "fsdp2")
            }
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
        assert len(results[0][name]["scored"]) == len(alone["scored"])
        for one, other in zip(results[0][name]["scored"], alone["scored"], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=0.1 if name in updating.IN_16_BITS else 1e-5)


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
