"""Loss and gradient do not depend on how a window is split, ordered, dealt to processes, packed or padded.

Tested for every registered choice of every part, except `token_mean scope=micro_batch`, which depends on the split by
definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm.literal import NAN
from algorithm.windows import (
    ALGORITHMS,
    OF_CHOICES,
    WEIGHTS,
    Window,
    advantages_in,
    choices,
    deal,
    run,
    splits,
    suited,
    windows,
)
from composed import built
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from grpocli.algorithm.algorithm import PARTS
from grpocli.algorithm.metrics import EXTREMES

DPPO = ("algorithm/objective=dppo", "algorithm.objective.divergence=kl", "algorithm.objective.drift=0.1")
INFORMATIVE = ("algorithm/aggregate=token_mean", "algorithm.aggregate.informative_only=true")
OPTIONS = {
    "sequence level": ("algorithm.objective.level=sequence",),
    "dual and delta": ("algorithm.objective.dual=1.3", "algorithm.objective.delta=1.5"),
    "drop_above": ("algorithm.objective.drop_above=0.1",),
    "drop_above, sequence level": ("algorithm.objective.drop_above=0.1", "algorithm.objective.level=sequence"),
    "cispo, low": ("algorithm/objective=cispo", "algorithm.objective.low=0.1", "algorithm.objective.high=0.1"),
    "dppo, kl and drift": (*DPPO, "algorithm.objective.low=0.01", "algorithm.objective.high=0.02"),
    "dppo without bounds": ("algorithm/objective=dppo", "algorithm.objective.low=inf", "algorithm.objective.high=inf"),
    "reinforce_pp over tokens": ("algorithm/advantage=reinforce_pp", "algorithm.advantage.over=tokens"),
    "leave_one_out, scaled": ("algorithm/advantage=leave_one_out", "algorithm.advantage.scale=others"),
    "token_mean by group": ("algorithm/aggregate=token_mean", "algorithm.aggregate.scope=group"),
    "token_mean of informative": INFORMATIVE,
    "informative by group": (*INFORMATIVE, "algorithm.aggregate.scope=group"),
    "on-policy k1": ("algorithm/kl=k1", "algorithm.kl.on_policy=true"),
    "on-policy k3": ("algorithm.kl.on_policy=true",),
    "weigh tokens, drop sequences": ("algorithm/correction=importance", "algorithm.correction.drop=sequence"),
    "bounded advantages": ("algorithm.advantage_min=-0.5", "algorithm.advantage_max=0.7"),
    "bounded below": ("algorithm/correction=token_mask", "algorithm.correction.min=0.8"),
    "normalize_then_sum": ("algorithm.combine=normalize_then_sum", "algorithm/aggregate=token_mean"),
    "normalize_then_sum of informative": (*INFORMATIVE, "algorithm.combine=normalize_then_sum"),
    "top_entropy and bonus": ("algorithm/tokens=top_entropy", "algorithm/entropy=bonus"),
    "no eps": ("algorithm.advantage.eps=0",),
}
VARIED = ("normalize_then_sum", "no eps", "leave_one_out, scaled", "reinforce_pp over tokens")
"""Options of the advantages."""
SUPERVISED = "advantage=supervised"
"""1 everywhere: the completions are answers of the data, which scores do not compare."""
UNLIKE = ("advantage=none", SUPERVISED, "reinforce_pp over tokens")
"""Advantages that are the same everywhere, or not 0 where a group is constant."""
# The base has every term, so that a choice is tried together with the others.
VARIANTS = {
    **{name: (f"algorithm={name}",) for name in ALGORITHMS},
    **{name: ("algorithm=grpo", *overrides) for name, overrides in {**choices(), **OPTIONS}.items()},
}
NAMED = {name: (f"algorithm={name}",) for name in OF_CHOICES}
ALL = VARIANTS | NAMED


def variants(fast: int) -> list[Any]:
    """A few in `make test-fast`; named algorithms of tested choices only in `make test-all`."""
    return [*table(VARIANTS, fast), *table(NAMED, fast=1, other_tier=pytest.mark.survival)]


def advantages_of(name: str, window: Window) -> torch.Tensor:
    return advantages_in(built(*ALL[name]), window)


def assert_close(name: str, one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor, tolerance: float) -> None:
    assert other.isfinite().all(), name
    assert (one - other).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("name", variants(fast=12))
@given(window=windows(), split=splits())
@settings(max_examples=6)
def test_loss_does_not_depend_on_split_order_processes_or_padding(
    name: str, window: Window, split: tuple[int, int, int]
) -> None:
    algorithm = built(*ALL[name])
    advantages = advantages_of(name, window)
    n = len(advantages)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        whole = run(algorithm, window, advantages, [torch.arange(n)], dtype)
        pieces = run(algorithm, window, advantages, deal(n, split), dtype, torch.Generator().manual_seed(split[0]))
        largest = whole.gradient.abs().max()
        assert_close("gradient", whole.gradient, pieces.gradient, largest, tolerance)
        # a loss is a sum that may cancel: its error is relative to the size of the terms
        size = pieces.pieces.abs().sum() + whole.gradient.abs().sum()
        assert_close("loss", whole.loss, pieces.loss, size, tolerance)
        assert whole.metrics.keys() == pieces.metrics.keys()
        for metric in whole.metrics.keys() - EXTREMES.keys():
            value = whole.metrics[metric]
            assert_close(metric, value, pieces.metrics[metric], 1 + value.abs(), 10 * tolerance)
        for metric, sign in EXTREMES.items():
            if metric in whole.metrics:  # the extremes of the parts include those of the whole
                assert sign * (pieces.metrics[metric] - whole.metrics[metric]) >= -tolerance, metric


@pytest.mark.parametrize("name", [*choices("advantage", "question_weight"), *VARIED])
@given(window=windows(), seed=st.integers(0, 9999))
@settings(max_examples=15)
def test_advantages_follow_their_completions(name: str, window: Window, seed: int) -> None:
    """Questions and completions in another order have the same advantages."""
    algorithm = built(*ALL[name])
    generator = torch.Generator().manual_seed(seed)
    p, g = window.rewards["a"].shape
    questions, completions = torch.randperm(p, generator=generator), torch.randperm(g, generator=generator)
    rewards = suited(algorithm, window.rewards)
    lengths = window.mask.sum(1).reshape(p, g)
    one = algorithm.advantages(rewards, WEIGHTS, lengths=lengths)
    moved = {reward: values[questions][:, completions] for reward, values in rewards.items()}
    other = algorithm.advantages(moved, WEIGHTS, lengths=lengths[questions][:, completions])
    assert one.isfinite().all()
    torch.testing.assert_close(other, one[questions][:, completions], rtol=1e-9, atol=1e-12)
    assert other.any(1).tolist() == one.any(1)[questions].tolist()


PENALTIES = ("on-policy k1", "on-policy k3", "top_entropy and bonus", "objective=mirror", "dppo, kl and drift")
WITHOUT_PENALTIES = [
    name for name in VARIANTS if not name.startswith(("kl=", "entropy=")) and name not in (*PENALTIES, SUPERVISED)
]


@pytest.mark.parametrize("name", table(WITHOUT_PENALTIES, fast=12))
@given(window=windows(), value=st.floats(-3, 3), split=splits())
@settings(max_examples=5)
def test_constant_groups_give_no_gradient(name: str, window: Window, value: float, split: tuple[int, int, int]) -> None:
    """If all groups are constant, or partly unscored, advantages, loss and gradient are exactly 0."""
    algorithm = replace(built(*ALL[name]), kl=built("algorithm=dapo").kl)
    a = window.rewards["a"]
    levels = value * torch.arange(1, len(a) + 1, dtype=a.dtype)[:, None].expand_as(a)
    for dtype in (torch.float64, torch.float32):
        rewards = {"a": levels.masked_fill(a.isnan(), NAN).to(dtype), "b": torch.full_like(a, NAN).to(dtype)}
        advantages = advantages_in(algorithm, window, rewards)
        assert advantages.eq(0).all()
        for pieces in ([torch.arange(len(advantages))], deal(len(advantages), split)):
            result = run(algorithm, window, advantages, pieces, dtype)
            assert result.loss == 0
            assert result.gradient.eq(0).all()
            assert all(value.isfinite() for value in result.metrics.values())


@pytest.mark.parametrize("name", [n for n in (*choices("advantage", "question_weight"), *VARIED) if n not in UNLIKE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_group_among_others_gives_no_gradient(name: str, dtype: torch.dtype) -> None:
    """Its advantages are exactly 0; with a rounding error `informative_only` would count the group."""
    algorithm = built(*ALL[name])
    for seed in range(20):
        rewards = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        rewards[2] = rewards[2, 0].item()
        advantages = algorithm.advantages({"a": rewards, "b": rewards.square()}, WEIGHTS)
        assert advantages.ne(0).any(1).tolist() == [True, True, False, True]


def test_the_clip_ratio_of_sequences_is_a_mean_over_rows() -> None:
    """Flags [B] of rows with one token must not be mistaken for flags [B, 1]."""
    algorithm = built("algorithm=grpo", "algorithm/kl=none", "algorithm.objective.level=sequence")
    logp, old = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), torch.zeros(3, 2)
    mask, advantages = torch.tensor([[1, 0], [1, 1], [1, 0]]), torch.ones(3)
    totals = algorithm.totals(advantages, mask)
    whole = algorithm.loss(logp, old, advantages, mask, totals=totals)[1]["clip_ratio/high_mean"]
    apart = [
        algorithm.loss(
            logp[rows, :width], old[rows, :width], advantages[rows], mask[rows, :width], group_ids=ids, totals=totals
        )[1]["clip_ratio/high_mean"]
        for rows, width, ids in (([0, 2], 1, torch.tensor([1, 3])), ([1], 2, torch.tensor([2])))
    ]
    assert whole.item() == pytest.approx(2 / 3)
    assert sum(apart).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", variants(fast=12))
def test_a_window_without_rows_or_tokens_is_zero(name: str) -> None:
    """Such a window remains if dynamic sampling keeps no group, or every completion is masked."""
    algorithm = built(*ALL[name])
    for rows, width in ((0, 1), (0, 0), (2, 3)):
        nothing = torch.full((rows, width), NAN, requires_grad=True)
        loss, metrics = algorithm.loss(
            nothing,
            nothing.detach(),
            torch.linspace(-1, 1, rows),
            torch.zeros(rows, width).long(),
            group_ids=torch.zeros(rows).long(),
            ref_logp=nothing.detach(),
            entropy=nothing,
        )
        assert loss == 0
        assert torch.autograd.grad(loss, nothing)[0].eq(0).all()
        assert all(value == 0 for value in metrics.values())


def test_every_part_is_tested() -> None:
    assert {name.split("=")[0] for name in choices()} == set(PARTS)
