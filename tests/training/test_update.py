"""Optimizer updates do not depend on micro-batches, and use the right old log-probs without unnecessary forwards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training.updating import SAMPLING, copies, known, train_step, updater_for

from grpocli.algorithm.metrics import EXTREMES
from grpocli.config.schema import Train
from grpocli.distributed.world import World
from grpocli.models.loading import checkpoint_activations
from grpocli.rollout.sampler import sample
from grpocli.training import packing
from grpocli.training.optim import AdamW
from grpocli.training.packing import MicroBatch
from grpocli.training.policy import Policy, Reference
from grpocli.types import Request, Row


class Casts(TorchDispatchMode):
    """Counts the tensors of a shape that are cast to bfloat16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16
        self.count += is_cast and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


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


def trained(little_model, world: World, rows: list[Row], algorithm: str, **train: int) -> SimpleNamespace:
    up = updater_for(little_model, world, algorithm, **train)
    metrics = train_step(up, copies(rows), n_groups=2)
    weights = torch.cat([p.detach().flatten() for p in up.policy.model.parameters()])
    return SimpleNamespace(metrics=metrics, weights=weights, updates=up.updates)


FOUR_UPDATES = {"epochs": 2, "minibatches": 2}


@pytest.mark.parametrize(
    ("algorithm", "train"), [("dapo", {}), ("drgrpo", {}), ("grpo", FOUR_UPDATES), ("dgpo", FOUR_UPDATES)]
)
def test_micro_batches_change_nothing(little_model, world, rows, algorithm: str, train: dict[str, int]) -> None:
    whole = trained(little_model, world, rows, f"algorithm={algorithm}", micro_batch_tokens=10_000, **train)
    split = trained(little_model, world, rows, f"algorithm={algorithm}", micro_batch_tokens=20, **train)
    assert whole.updates == split.updates == train.get("epochs", 1) * train.get("minibatches", 1)
    torch.testing.assert_close(split.weights, whole.weights, rtol=0, atol=2e-5)
    for name in whole.metrics.keys() - {"tokens/padding", "tokens/shared", *EXTREMES}:
        value = whole.metrics[name]
        assert split.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name


def test_rows_get_the_log_probs_of_the_policy_at_the_start_of_the_step(little_model, world, rows) -> None:
    """This holds after any number of updates, and if the objective's old log-probs are the sampler's.

    Others' old log-probs are kept from the first update, or computed before it if another window comes first.
    """
    up = updater_for(little_model, world, "algorithm=drgrpo", micro_batch_tokens=20, epochs=2, minibatches=2)
    given = copies(rows)
    given[1].old_logp = [-3.0] * len(rows[1].completion_ids)
    given[2].mask = [0] * len(rows[2].mask)
    given[3].advantage = 0.0

    def scored() -> list[Any]:
        batches = [MicroBatch.build([row], world.device) for row in rows]
        return [up.policy.scores_without_gradient(batch, SAMPLING)[:2] for batch in batches]

    before = scored()
    train_step(up, given, n_groups=2)
    old_logp = {k: known(up, row, "old_logp") for k, row in enumerate(given) if k not in (1, 2, 3)}
    up.gather(given)
    for k, (row, expected, now) in enumerate(zip(given, before, scored(), strict=True)):
        found = row.logp, row.entropy
        if k in (2, 3):
            assert found == (None, None), "not computed"
            continue
        np.testing.assert_allclose(found, [values[0] for values in expected], rtol=0, atol=1e-4)
        if k in old_logp:
            torch.testing.assert_close(old_logp[k], expected[0][0], rtol=0, atol=1e-5)
            assert not torch.allclose(old_logp[k], now[0][0], atol=1e-4)


@pytest.mark.parametrize("overrides", [["algorithm/correction=sampler"], ["algorithm=sft"]])
def test_log_probs_of_a_later_policy_are_not_those_of_the_step(little_model, world, rows, overrides: list[str]) -> None:
    """The forward of the second window comes after an update; its ratios are known all the same."""
    up = updater_for(little_model, world, *overrides, minibatches=2)
    given = copies(rows)
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


def test_rows_get_their_last_ratio_and_the_tokens_that_were_clipped(little_model, world, rows) -> None:
    """With one update a step each ratio is 1, and none is recorded."""
    narrow = "algorithm.objective.low=1e-4", "algorithm.objective.high=1e-4"
    up = updater_for(little_model, world, "algorithm=dapo", *narrow)
    trained_rows = copies(rows)
    train_step(up, trained_rows, n_groups=2)
    up.gather(trained_rows)
    assert all(row.ratio is None and row.clipped is None for row in trained_rows)

    up.train = Train(epochs=2)
    trained_rows = copies(rows)
    metrics = train_step(up, trained_rows, n_groups=2)
    up.gather(trained_rows)
    high = [(row.ratio > 1 + 1e-4) if row.advantage > 0 else (row.ratio < 1 - 1e-4) for row in trained_rows]
    clipped = np.concatenate([row.clipped for row in trained_rows])
    assert clipped.tolist() == np.concatenate(high).tolist()  # of two updates the first has ratios of 1
    assert clipped.mean().item() == pytest.approx(2 * metrics["clip_ratio/region_mean"])
    assert 0 < clipped.mean() < 1


def test_gradients_are_clipped_to_the_norm(little_model, world, rows) -> None:
    steps = {}
    for limit in (0.0, 1e-4):
        up = updater_for(little_model, world, "algorithm=drgrpo")
        up.optim_config = AdamW(lr=1.0, max_grad_norm=limit)
        up.optimizer = torch.optim.SGD(up.policy.model.parameters(), lr=1.0)
        before = torch.cat([p.detach().flatten().clone() for p in up.policy.model.parameters()])
        norm = train_step(up, copies(rows), n_groups=2)["grad_norm"]
        after = torch.cat([p.detach().flatten() for p in up.policy.model.parameters()])
        steps[limit] = (after - before).norm().item(), norm
    assert steps[0.0][0] == pytest.approx(steps[0.0][1], rel=1e-3)
    assert steps[1e-4][0] == pytest.approx(1e-4, rel=1e-2)
    assert steps[1e-4][1] == pytest.approx(steps[0.0][1], rel=1e-4)


def test_a_fused_optimizer_clips_as_torch_does(little_model, world, rows) -> None:
    """It divides gradients while it reads them; SGD above is not fused."""
    weights = {}
    for fused in (True, False):
        up = updater_for(little_model, world, "algorithm=drgrpo")
        up.optim_config = AdamW(lr=1e-3, eps=1e-3, max_grad_norm=1e-4)
        up.optimizer = torch.optim.AdamW(up.policy.model.parameters(), eps=1e-3, fused=fused)
        train_step(up, copies(rows), n_groups=2)
        weights[fused] = torch.cat([p.detach().flatten() for p in up.policy.model.parameters()])
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-6, atol=1e-9)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the forwards that a test runs, in order."""
    ran: list[str] = []

    def record(owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args, **named: ran.append(name) or original(*args, **named))

    record(Policy, "scores", "update")
    record(Policy, "scores_without_gradient", "score")
    record(Reference, "logp", "reference")
    return ran


@pytest.mark.parametrize(
    ("algorithm", "train", "expected"),
    [
        (["algorithm=dapo"], {}, ["update"]),
        (["algorithm=dapo"], {"epochs": 3}, ["update"] * 3),
        (["algorithm=dapo"], {"minibatches": 2}, ["score", "update", "update"]),
        (["algorithm=dapo"], FOUR_UPDATES, ["score", *["update"] * 4]),
        (["algorithm=grpo"], {}, ["reference", "update"]),
        (["algorithm=dapo", "algorithm/tokens=top_entropy"], {}, ["score", "update"]),
        (["algorithm=dapo", "algorithm/correction=sampler"], FOUR_UPDATES, ["update"] * 4),
    ],
)
def test_no_forward_is_superfluous(
    little_model, world, rows, forwards, algorithm, train, expected, monkeypatch
) -> None:
    monkeypatch.setattr(packing, "PADDING", 1.0)  # one micro-batch, however much its rows differ
    train_step(updater_for(little_model, world, *algorithm, **train), copies(rows), n_groups=2)
    assert forwards == expected


def test_a_leftover_row_is_off_policy_at_the_first_update(little_model, world, rows) -> None:
    """Its old log-probs are the sampler's; the other rows of its micro-batch are on-policy."""
    mine = copies(rows)
    leftover = next(r for r in mine if r.advantage > 0)
    leftover.old_logp = [value - 1.0 for value in leftover.rollout_logp]  # ratio e, beyond 1 + 0.28
    up = updater_for(little_model, world, "algorithm=dapo")
    metrics = train_step(up, mine, n_groups=2)
    tokens = sum(len(r.completion_ids) for r in mine)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(len(leftover.completion_ids) / tokens)
    assert metrics["clip_ratio/low_mean"] == 0
    assert known(up, leftover, "old_logp").equal(torch.tensor(leftover.old_logp)), "the sampler's log-probs stay"


def test_with_the_sampler_as_old_policy_every_update_starts_from_its_log_probs(little_model, world, rows) -> None:
    """The weights are those of rows whose old log-probs are the sampler's; the gap is that of the first update."""
    bypass, given = (copies(rows) for _ in range(2))
    for row in given:
        row.old_logp = row.rollout_logp
    ours, same = (
        updater_for(little_model, world, "algorithm=dapo", f"algorithm/correction={name}", **FOUR_UPDATES)
        for name in ("sampler", "none")
    )
    metrics, _ = train_step(ours, bypass, n_groups=2), train_step(same, given, n_groups=2)
    for one, other in zip(ours.policy.model.parameters(), same.policy.model.parameters(), strict=True):
        assert one.equal(other)
    assert metrics["token_mult_prob_error"] == pytest.approx(1, abs=1e-4), "later updates' drift does not count"
    assert metrics["clip_ratio/region_mean"] > 0


def test_the_schedule_follows_the_step_not_the_number_of_updates(little_model, world, rows) -> None:
    up = updater_for(little_model, world, "algorithm=dapo", minibatches=2)
    up.optim_config = type(up.optim_config)(lr=1.0, schedule="linear")
    assert train_step(up, [], n_groups=0, step=1)["lr"] == pytest.approx(1.0)
    one_group = copies([r for r in rows if r.group == 0])
    assert train_step(up, one_group, n_groups=1, step=2)["lr"] == pytest.approx(0.8)  # update 2 of 10
    assert train_step(up, copies(rows), n_groups=2, step=3)["lr"] == pytest.approx(0.5)  # updates 4, 5
    assert up.updates == 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_weight_is_cast_once_for_all_micro_batches(little_model, world, rows, checkpointing: bool) -> None:
    """With checkpointing it is cast when it is needed, so that no copy of all weights waits for the backward pass."""
    gradients, counts = [], []
    for once in (True, False):
        up = updater_for(little_model, world, "algorithm=drgrpo", micro_batch_tokens=20)
        up.policy.dtype = torch.bfloat16
        if checkpointing:
            checkpoint_activations(up.policy.model)
            up.policy.recomputes = True
        window = up.begin_step(copies(rows), 2, 1)[0]
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
