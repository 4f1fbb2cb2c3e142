"""Old log-probs come from the right policy, without unnecessary forwards."""

from __future__ import annotations

import copy

import pytest
import torch
from training.test_update import SAMPLING, rows, updater, world
from training.updating import known, train_step

from grpocli.training import packing
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.policy import Policy, Reference
from grpocli.types import Row

__all__ = ["rows", "world"]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the forwards that a test runs, in order."""
    ran: list[str] = []

    def record(cls: type, method: str, name: str) -> None:
        original = getattr(cls, method)

        def call(*args, **kwargs):
            ran.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(cls, method, call)

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
        (["algorithm=dapo"], {"minibatches": 2, "epochs": 2}, ["score", *["update"] * 4]),
        (["algorithm=grpo"], {}, ["reference", "update"]),
        (["algorithm=dapo", "algorithm/tokens=top_entropy"], {}, ["score", "update"]),
        (["algorithm=dapo", "algorithm/correction=sampler"], {"minibatches": 2, "epochs": 2}, ["update"] * 4),
    ],
)
def test_no_forward_is_superfluous(
    little_model, world, rows, forwards, algorithm, train, expected, monkeypatch
) -> None:
    monkeypatch.setattr(packing, "PADDING", 1.0)  # one micro-batch, however much its rows differ
    train_step(updater(little_model, world, *algorithm, **train), [copy.copy(r) for r in rows], n_groups=2)
    assert forwards == expected


def test_old_log_probs_are_of_the_policy_at_the_start_of_the_step(little_model, world, rows) -> None:
    """They are kept from the first update, or computed before it if another window comes first."""
    mine = [copy.copy(r) for r in rows]
    up = updater(little_model, world, "algorithm=dapo", epochs=2, minibatches=2)
    start = up.policy.scores_without_gradient(MicroBatch.build(mine, world.device), SAMPLING).logp
    train_step(up, mine, n_groups=2)
    after = up.policy.scores_without_gradient(MicroBatch.build(mine, world.device), SAMPLING).logp
    for row, before, now in zip(mine, start, after, strict=True):
        n = len(row.completion_ids)
        old_logp = known(up, row, "old_logp")
        torch.testing.assert_close(old_logp, before[:n], rtol=0, atol=1e-5)
        assert not torch.allclose(old_logp, now[:n], atol=1e-4)


def test_a_leftover_row_is_off_policy_at_the_first_update(little_model, world, rows) -> None:
    """Its old log-probs are the sampler's; the other rows of its micro-batch are on-policy."""
    mine = [copy.copy(r) for r in rows]
    leftover = next(r for r in mine if r.advantage > 0)
    leftover.old_logp = [value - 1.0 for value in leftover.rollout_logp]  # ratio e, beyond 1 + 0.28
    up = updater(little_model, world, "algorithm=dapo")
    metrics = train_step(up, mine, n_groups=2)
    tokens = sum(len(r.completion_ids) for r in mine)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(len(leftover.completion_ids) / tokens)
    assert metrics["clip_ratio/low_mean"] == 0
    assert known(up, leftover, "old_logp").equal(torch.tensor(leftover.old_logp)), "the sampler's log-probs stay"


def test_with_the_sampler_as_old_policy_every_update_starts_from_its_log_probs(little_model, world, rows) -> None:
    """The weights are those of rows whose old log-probs are the sampler's; the gap is that of the first update."""
    bypass, given = ([copy.copy(r) for r in rows] for _ in range(2))
    for row in given:
        row.old_logp = row.rollout_logp
    train = {"minibatches": 2, "epochs": 2}
    ours = updater(little_model, world, "algorithm=dapo", "algorithm/correction=sampler", **train)
    same = updater(little_model, world, "algorithm=dapo", "algorithm/correction=none", **train)
    metrics, _ = train_step(ours, bypass, n_groups=2), train_step(same, given, n_groups=2)
    for one, other in zip(ours.policy.model.parameters(), same.policy.model.parameters(), strict=True):
        assert one.equal(other)
    assert metrics["token_mult_prob_error"] == pytest.approx(1, abs=1e-4), "later updates' drift does not count"
    assert metrics["clip_ratio/region_mean"] > 0


def test_the_schedule_follows_the_step_not_the_number_of_updates(little_model, world, rows) -> None:
    up = updater(little_model, world, "algorithm=dapo", minibatches=2)
    up.optim_config = type(up.optim_config)(lr=1.0, schedule="linear")
    assert train_step(up, [], n_groups=0, step=1)["lr"] == pytest.approx(1.0)
    one_group = [copy.copy(r) for r in rows if r.group == 0]
    assert train_step(up, one_group, n_groups=1, step=2)["lr"] == pytest.approx(0.8)  # update 2 of 10
    assert train_step(up, [copy.copy(r) for r in rows], n_groups=2, step=3)["lr"] == pytest.approx(0.5)  # updates 4, 5
    assert up.updates == 3


def test_an_entropy_bonus_raises_the_entropy(little_model, world, rows) -> None:
    flat: list[Row] = [copy.copy(r) for r in rows]
    for row in flat:
        row.advantage = 0.0
    entropies = {}
    for coefficient in (0.0, 1.0):
        bonus = ["algorithm/entropy=bonus", f"algorithm.entropy.coefficient={coefficient}"]
        up = updater(little_model, world, "algorithm=dapo", *bonus)
        for step in (1, 2):
            train_step(up, [copy.copy(r) for r in flat], n_groups=2, step=step)
        batch = MicroBatch.build(flat, world.device)
        entropy_BT = up.policy.scores_without_gradient(batch, SAMPLING).entropy
        entropies[coefficient] = entropy_BT[batch.mask.bool()].mean()
    assert entropies[1.0] > entropies[0.0] + 1e-3
