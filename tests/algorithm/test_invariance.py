"""Loss and gradient do not depend on how a window is split, ordered or padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpocli import build_algorithm
from grpocli.algorithm import Algorithm

NAMES = ("grpo", "dapo", "drgrpo", "dgpo")
ALGORITHMS = {name: build_algorithm(f"algorithm={name}") for name in NAMES}
ALGORITHMS["dapo by group"] = build_algorithm("algorithm=dapo", "algorithm.aggregate.scope=group")
ALGORITHMS["gspo"] = build_algorithm("algorithm=grpo", "algorithm.objective.level=sequence")
ALGORITHMS["corrected"] = build_algorithm("algorithm=grpo", "algorithm/correction=sequence_mask")


@st.composite
def windows(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Groups of ragged completions, some constant, some without reward, some rows without a token."""
    p, g = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    lengths = draw(st.lists(st.integers(0, 5), min_size=p * g, max_size=p * g))
    values = st.sampled_from([0.0, 0.5, 1.0, float("nan")])
    rewards = draw(st.lists(values, min_size=p * g, max_size=p * g))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    width = max(1, *lengths)
    logp = -torch.rand(p * g, width, generator=generator, dtype=torch.float64) * 3

    def near(scale: float) -> torch.Tensor:
        return logp + scale * torch.randn(p * g, width, generator=generator, dtype=torch.float64)

    return {
        "rewards": torch.tensor(rewards, dtype=torch.float64).reshape(p, g),
        "logp": logp,
        "old": near(0.4),
        "ref": near(0.4),
        "sampler": near(0.1),
        "mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
        "groups": torch.arange(p).repeat_interleave(g),
    }


def loss_and_gradient(
    algorithm: Algorithm, window: dict[str, torch.Tensor], pieces: list[torch.Tensor], padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over `pieces` (row indices) of their losses, and its gradient in the window's own order."""
    advantages = algorithm.advantages({"r": window["rewards"]}).reshape(-1)
    totals = algorithm.totals(advantages, window["mask"], window["groups"])
    leaf = window["logp"].clone().requires_grad_()
    loss, metrics = leaf.new_zeros(()), dict[str, torch.Tensor]()
    for rows in pieces:

        def cut(x: torch.Tensor, rows: torch.Tensor = rows) -> torch.Tensor:
            return torch.nn.functional.pad(x[rows], (0, padding), value=float("nan"))

        mask = torch.nn.functional.pad(window["mask"][rows], (0, padding))
        part, more = algorithm.loss(
            cut(leaf),
            cut(window["old"]),
            advantages[rows],
            mask,
            group_ids=window["groups"][rows],
            ref_logp=cut(window["ref"]),
            rollout_logp=cut(window["sampler"]),
            totals=totals,
        )
        loss = loss + part
        metrics = {k: metrics.get(k, 0.0) + v for k, v in more.items()}
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


@pytest.mark.parametrize("name", ALGORITHMS)
@given(window=windows(), seed=st.integers(0, 99), size=st.integers(1, 5), padding=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_split_order_and_padding(
    name: str, window: dict[str, torch.Tensor], seed: int, size: int, padding: int
) -> None:
    n = len(window["logp"])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    whole = loss_and_gradient(ALGORITHMS[name], window, [torch.arange(n)])
    split = loss_and_gradient(ALGORITHMS[name], window, list(order.split(size)), padding)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
    assert whole[0].isfinite()
    assert whole[1].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_constant_groups_teach_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    rewards = torch.full((2, 3), 0.1, dtype=torch.float32)
    advantages = algorithm.advantages({"r": rewards}).reshape(-1)
    assert advantages.eq(0).all()
    logp = torch.full((6, 4), -1.0, requires_grad=True)
    loss, metrics = algorithm.loss(
        logp,
        logp.detach(),
        advantages,
        torch.ones(6, 4),
        group_ids=torch.arange(2).repeat_interleave(3),
        ref_logp=logp.detach(),
    )
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, logp)[0].eq(0).all()
    assert all(value.isfinite() for value in metrics.values())
