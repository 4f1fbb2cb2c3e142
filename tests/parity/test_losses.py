"""Loss, gradient and metrics of the same tensors, in TRL and grpocli."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from parity import cases as trl
from parity.cases import Case, case, our_loss
from parity.table import Table
from parity.trl_side import Peer
from torch import Tensor

from grpocli import build_algorithm
from grpocli.algorithm import Algorithm

SEEDS = range(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", trl.WHOLE + trl.CORRECTED + trl.SPLIT + trl.MASKED, ids=str)
def test_loss_and_gradient_are_trls(case: Case, dtype: torch.dtype, table: Table, folder: Path) -> None:
    peer = case.peer(folder)
    algorithm = build_algorithm(*case.overrides)
    for seed in SEEDS:
        peer.sample(case.batch(dtype, seed))
        compare(table, case, peer, algorithm, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_on_policy_loss_and_gradient_are_trls(dtype: torch.dtype, table: Table, folder: Path) -> None:
    """In the first update after a rollout both use logp.detach() as old log-probs."""
    on_policy = case("dapo, on policy, KL x ratio", "dapo", trl.KL_WEIGHTED, trl.DAPO + trl.OUR_KL_WEIGHTED)
    peer = on_policy.peer(folder, num_iterations=1)
    for seed in SEEDS:
        peer.sample(on_policy.batch(dtype, seed))
        assert "old_per_token_logps" not in peer.inputs
        compare(table, on_policy, peer, build_algorithm(*on_policy.overrides), dtype, old_logp=peer.batch.logp)


def test_a_whole_step_is_trls(table: Table, folder: Path) -> None:
    """From rewards to the gradient, with KL and the correction for the sampler."""
    step = case(
        "from rewards, KL, token_truncate",
        "dapo",
        trl.HIGH | trl.KL | {"vllm_importance_sampling_mode": "token_truncate"},
        (),
        sampler=True,
    )
    peer = step.peer(folder, reward_weights=[1.0, 0.5])
    algorithm = build_algorithm(
        "algorithm=dapo", *trl.OUR_KL, "algorithm/correction=token_truncate", "algorithm.correction.max=3.0"
    )
    rewards = {name: torch.tensor([float("nan") if v is None else v for v in vs]) for name, vs in trl.REWARDS.items()}
    ours = algorithm.advantages(
        {name: r.reshape(-1, trl.GROUP) for name, r in rewards.items()}, {"correct": 1.0, "format": 0.5}
    )
    for seed in SEEDS:
        peer.sample(step.batch(torch.float32, seed))
        compare(table, step, peer, algorithm, torch.float32, advantages=ours.flatten())


def test_no_two_cases_are_the_same_definition() -> None:
    """Otherwise a comparison could pass without reaching the bound that it tests."""
    advantages = torch.tensor([-1.1, 0.6, 0.3, 0.6, -0.7, 0.2, -0.7, 1.4], dtype=torch.float64)
    mask = (torch.arange(trl.LENGTH) < torch.tensor(trl.RAGGED).unsqueeze(1)).long()
    values = {}
    for one in trl.WHOLE + [c for c in trl.CORRECTED if c.lengths == trl.RAGGED]:
        batch = one.batch(torch.float64, 0)
        values[one.name] = our_loss(build_algorithm(*one.overrides), batch, batch.logp, batch.entropy, advantages, mask)
    for (one, first), (other, second) in combinations(values.items(), 2):
        assert abs(first[0] - second[0]) > 1e-4, f"{one} and {other}"


def compare(
    table: Table,
    case: Case,
    peer: Peer,
    algorithm: Algorithm,
    dtype: torch.dtype,
    advantages: Tensor | None = None,
    old_logp: Tensor | None = None,
) -> None:
    """The loss, its gradient with respect to log-probs and entropies, and metrics."""
    theirs = torch.stack(peer.losses()).sum()
    theirs.backward()
    logp, entropy = (t.detach().clone().requires_grad_() for t in (peer.logp, peer.entropy))
    advantages = peer.advantages if advantages is None else advantages
    ours, metrics = our_loss(
        algorithm, peer.batch, logp, entropy, advantages.to(dtype), peer.mask, case.pieces, old_logp
    )
    ours.backward()
    name = case.name
    table.compare(name, "value", ours, theirs, dtype)
    gradient = _gradient(logp, entropy)
    assert gradient.any(), "there is nothing to compare"
    table.compare(name, "gradient", gradient, _gradient(peer.logp, peer.entropy), dtype)
    for our_name, their_name in case.metrics.items():
        value = peer.metric(their_name)
        assert (value is None) == (our_name not in metrics), f"{our_name} is logged by one side only"
        if value is not None:  # TRL's metrics are means in float32 for every dtype of the loss
            table.compare(name, "metrics", metrics[our_name].double(), value, torch.float32)


def _gradient(*leaves: Tensor) -> Tensor:
    """The gradients of both leaves; 0 for a leaf without a gradient."""
    return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
