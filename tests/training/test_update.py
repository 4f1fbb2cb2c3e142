"""Optimizer updates do not depend on micro-batches, and use the right old log-probs."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composed import built
from torch.utils._python_dispatch import TorchDispatchMode
from training.updating import train_step

from grpocli.algorithm.metrics import EXTREMES
from grpocli.config.schema import Train
from grpocli.distributed.world import World
from grpocli.hardware import Single
from grpocli.models.loading import checkpoint_activations
from grpocli.rollout.sampler import sample
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.optim import AdamW
from grpocli.training.policy import Policy, Reference
from grpocli.training.update import Updater
from grpocli.types import Request, Row, Sampling

SAMPLING = Sampling(10, temperature=0.9)


@pytest.fixture(scope="module")
def world() -> World:
    return World(Single(device="cpu"))


@pytest.fixture(scope="module")
def rows(little_model) -> list[Row]:
    """Two ragged groups of four, sampled by the model."""
    prompts = [[2, 5, 6], [2, 7, 8, 9, 10]]
    groups = sample(little_model, [Request(p, 4, i) for i, p in enumerate(prompts)], SAMPLING, [1], 1)
    advantages = [[1.0, -1.0, 0.5, -0.5], [0.2, 0.2, 0.2, -0.6]]
    return [
        Row(prompts[g], c.token_ids, [1] * len(c.token_ids), advantages[g][k], g, c.logprobs)
        for g, group in enumerate(groups)
        for k, c in enumerate(group)
    ]


def updater(little_model, world: World, *algorithm: str, **train: int) -> Updater:
    model = copy.deepcopy(little_model)
    optim = AdamW(lr=1e-3, max_grad_norm=0.0)
    wrapped, optimizer = world.parallel.prepare(model, torch.float32, optim.make_for)
    policy = Policy(model, wrapped, torch.float32, world.parallel)
    algo = built(*algorithm)
    return Updater(
        world=world,
        policy=policy,
        reference=Reference(copy.deepcopy(little_model), policy) if algo.needs_reference else None,
        algorithm=algo,
        optim_config=optim,
        optimizer=optimizer,
        train=Train(**train),
        sampling=SAMPLING,
        total_updates=10,
    )


def trained(little_model, world: World, rows: list[Row], algorithm: str, **train: int) -> SimpleNamespace:
    up = updater(little_model, world, algorithm, **train)
    metrics = train_step(up, [copy.copy(r) for r in rows], n_groups=2)
    weights = torch.cat([p.detach().flatten() for p in up.policy.model.parameters()])
    return SimpleNamespace(metrics=metrics, weights=weights, updates=up.updates)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "drgrpo", "dgpo"])
@pytest.mark.parametrize("train", [{}, {"epochs": 2, "minibatches": 2}])
def test_micro_batches_change_nothing(little_model, world, rows, algorithm: str, train: dict[str, int]) -> None:
    whole = trained(little_model, world, rows, f"algorithm={algorithm}", micro_batch_tokens=10_000, **train)
    split = trained(little_model, world, rows, f"algorithm={algorithm}", micro_batch_tokens=20, **train)
    assert whole.updates == split.updates == train.get("epochs", 1) * train.get("minibatches", 1)
    torch.testing.assert_close(split.weights, whole.weights, rtol=0, atol=2e-5)
    for name in whole.metrics.keys() - {"tokens/padding", "tokens/shared", *EXTREMES}:
        value = whole.metrics[name]
        assert split.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name


def test_the_first_update_is_on_policy(little_model, world, rows) -> None:
    once = trained(little_model, world, rows, "algorithm=dapo")
    assert once.metrics["clip_ratio/region_mean"] == 0
    assert once.metrics["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    twice = trained(little_model, world, rows, "algorithm=dapo", epochs=4)
    assert twice.metrics["clip_ratio/region_mean"] > 0
    assert twice.metrics["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("train", [{}, {"epochs": 2, "minibatches": 2}])
def test_rows_get_the_log_probs_of_the_policy_at_the_start_of_the_step(
    little_model, world, rows, train: dict[str, int]
) -> None:
    """This holds after any number of updates, and if the objective's old log-probs are the sampler's."""
    up = updater(little_model, world, "algorithm=drgrpo", micro_batch_tokens=20, **train)
    given = [copy.copy(r) for r in rows]
    given[1].old_logp = [-3.0] * len(rows[1].completion_ids)
    given[2].mask = [0] * len(rows[2].mask)
    given[3].advantage = 0.0
    before = [up.policy.scores_without_gradient(MicroBatch.build([row], world.device), SAMPLING)[:2] for row in rows]
    train_step(up, given, n_groups=2)
    up.gather(given)
    for k, (row, expected) in enumerate(zip(given, before, strict=True)):
        found = row.logp, row.entropy
        if k in (2, 3):
            assert found == (None, None), "not computed"
        else:
            np.testing.assert_allclose(found, [values[0] for values in expected], rtol=0, atol=1e-4)


@pytest.mark.parametrize("overrides", [["algorithm/correction=sampler"], ["algorithm=sft"]])
def test_log_probs_of_a_later_policy_are_not_those_of_the_step(little_model, world, rows, overrides: list[str]) -> None:
    """The forward of the second window comes after an update; its ratios are known all the same."""
    up = updater(little_model, world, *overrides, minibatches=2)
    given = [copy.copy(r) for r in rows]
    for row in given:
        row.old_logp = row.rollout_logp
    first = [row.group == 0 for row in given]
    before = up.policy.scores_without_gradient(MicroBatch.build(given, world.device), SAMPLING).logp
    train_step(up, given, n_groups=2)
    up.gather(given)
    assert [row.logp is not None for row in given] == [row.entropy is not None for row in given] == first
    assert all(row.ratio is not None and row.clipped is not None for row in given)
    for row, logp_T in zip(given, before, strict=True):
        if row.logp is not None:
            torch.testing.assert_close(torch.from_numpy(row.logp), logp_T[: len(row.logp)], rtol=0, atol=1e-4)


def test_extremes_of_clipping_are_taken_over_the_micro_batches_of_all_updates(little_model, world, rows) -> None:
    """Each micro-batch is one row: the largest and smallest share over four updates enclose the mean."""
    split = trained(little_model, world, rows, "algorithm=dapo", epochs=4, micro_batch_tokens=20).metrics
    whole = trained(little_model, world, rows, "algorithm=dapo", epochs=4).metrics
    assert split["clip_ratio/low_min"] == 0 <= whole["clip_ratio/low_min"] <= whole["clip_ratio/low_mean"]
    assert split["clip_ratio/high_max"] > whole["clip_ratio/high_max"] > whole["clip_ratio/high_mean"] > 0
    once = trained(little_model, world, rows, "algorithm=dapo")
    assert once.metrics["clip_ratio/high_max"] == 0


def test_rows_get_their_last_ratio_and_the_tokens_that_were_clipped(little_model, world, rows) -> None:
    """With one update a step each ratio is 1, and none is recorded."""
    up = updater(little_model, world, "algorithm=dapo", "algorithm.objective.low=1e-4", "algorithm.objective.high=1e-4")
    trained_rows = [copy.copy(r) for r in rows]
    train_step(up, trained_rows, n_groups=2)
    up.gather(trained_rows)
    assert all(row.ratio is None and row.clipped is None for row in trained_rows)

    up.train = Train(epochs=2)
    trained_rows = [copy.copy(r) for r in rows]
    metrics = train_step(up, trained_rows, n_groups=2)
    up.gather(trained_rows)
    high = [(row.ratio > 1 + 1e-4) if row.advantage > 0 else (row.ratio < 1 - 1e-4) for row in trained_rows]
    clipped = np.concatenate([row.clipped for row in trained_rows])
    assert clipped.tolist() == np.concatenate(high).tolist()  # of two updates the first has ratios of 1
    assert clipped.mean().item() == pytest.approx(2 * metrics["clip_ratio/region_mean"])
    assert 0 < clipped.mean() < 1


def test_an_update_makes_completions_with_a_positive_advantage_likelier(little_model, world, rows) -> None:
    up = updater(little_model, world, "algorithm=drgrpo")
    ids = rows[0].prompt_ids + rows[0].completion_ids
    before = sum(up.policy.score(ids)[len(rows[0].prompt_ids) - 1 :])
    train_step(up, [copy.copy(r) for r in rows], n_groups=2)
    assert sum(up.policy.score(ids)[len(rows[0].prompt_ids) - 1 :]) > before


def test_without_groups_no_update_is_made(little_model, world) -> None:
    up = updater(little_model, world, "algorithm=dapo")
    assert train_step(up, [], n_groups=0)["tokens/trained"] == 0
    assert up.updates == 0


def test_learning_rates_follow_the_schedule() -> None:
    optim = AdamW(lr=1.0, warmup_steps=3, schedule="linear")
    assert [optim.rate(u, 7) for u in range(7)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25])
    assert AdamW(lr=1.0, schedule="cosine").rate(5, 10) == pytest.approx(0.5)
    assert AdamW(lr=1.0).rate(9, 10) == 1.0


def test_gradients_are_clipped_to_the_norm(little_model, world, rows) -> None:
    steps = {}
    for limit in (0.0, 1e-4):
        up = updater(little_model, world, "algorithm=drgrpo")
        up.optim_config = AdamW(lr=1.0, max_grad_norm=limit)
        up.optimizer = torch.optim.SGD(up.policy.model.parameters(), lr=1.0)
        before = torch.cat([p.detach().flatten().clone() for p in up.policy.model.parameters()])
        norm = train_step(up, [copy.copy(r) for r in rows], n_groups=2)["grad_norm"]
        after = torch.cat([p.detach().flatten() for p in up.policy.model.parameters()])
        steps[limit] = (after - before).norm().item(), norm
    assert steps[0.0][0] == pytest.approx(steps[0.0][1], rel=1e-3)
    assert steps[1e-4][0] == pytest.approx(1e-4, rel=1e-2)
    assert steps[1e-4][1] == pytest.approx(steps[0.0][1], rel=1e-4)


def test_a_fused_optimizer_clips_as_torch_does(little_model, world, rows) -> None:
    """It divides gradients while it reads them; SGD above is not fused."""
    weights = {}
    for fused in (True, False):
        up = updater(little_model, world, "algorithm=drgrpo")
        up.optim_config = AdamW(lr=1e-3, eps=1e-3, max_grad_norm=1e-4)
        up.optimizer = torch.optim.AdamW(up.policy.model.parameters(), eps=1e-3, fused=fused)
        train_step(up, [copy.copy(r) for r in rows], n_groups=2)
        weights[fused] = torch.cat([p.detach().flatten() for p in up.policy.model.parameters()])
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-6, atol=1e-9)


class Casts(TorchDispatchMode):
    """Counts the tensors of a shape that are cast to bfloat16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16
        self.count += is_cast and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_weight_is_cast_once_for_all_micro_batches(little_model, world, rows, checkpointing: bool) -> None:
    """With checkpointing it is cast when it is needed, so that no copy of all weights waits for the backward pass."""
    gradients, counts = [], []
    for once in (True, False):
        up = updater(little_model, world, "algorithm=drgrpo", micro_batch_tokens=20)
        up.policy.dtype = torch.bfloat16
        if checkpointing:
            checkpoint_activations(up.policy.model)
            up.policy.recomputes = True
        window = up.begin_step([copy.copy(r) for r in rows], 2, 1)[0]
        n = len(window.micro_batches)
        weight = up.policy.model.model.layers[0].mlp.down_proj.weight
        with Casts(weight.shape) as casts:
            for part in [window] if once else [replace(window, micro_batches=[b]) for b in window.micro_batches]:
                up.accumulate(part)
        counts.append(casts.count / len(up.policy.model.model.layers))
        gradients.append([p.grad for p in up.policy.model.parameters()])
    assert n > 1
    assert counts == ([2 * n, 2 * n] if checkpointing else [1, n])
    assert all(one.equal(other) for one, other in zip(*gradients, strict=True))


def test_norms_are_not_decayed(little_model) -> None:
    groups = AdamW(weight_decay=0.1).make(copy.deepcopy(little_model).parameters()).param_groups
    assert [(g["weight_decay"], {p.ndim for p in g["params"]}) for g in groups] == [(0.1, {2}), (0.0, {1})]


def test_the_reference_moves_towards_the_policy(little_model, world) -> None:
    up = updater(little_model, world, "algorithm=grpo")
    assert up.reference is not None
    with torch.no_grad():
        for p in up.policy.model.parameters():
            p.add_(1.0)
    up.reference.mix(0.25)
    for mine, start in zip(up.reference.model.parameters(), little_model.parameters(), strict=True):
        torch.testing.assert_close(mine, start + 0.25)


def test_micro_batches_are_counted_over_all_epochs(little_model, world: World, rows: list[Row]) -> None:
    reports: list[tuple[float, float]] = []
    up = updater(little_model, world, "algorithm=drgrpo", epochs=2, minibatches=2, micro_batch_tokens=40)
    up.progress = lambda done, total, unit, detail="": None if detail else reports.append((done, total))
    train_step(up, [copy.copy(row) for row in rows], 2)
    (total,) = {total for _, total in reports}
    assert [done for done, _ in reports] == list(range(int(total)))
    assert total > 4, "each of the four updates has several"
