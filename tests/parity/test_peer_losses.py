"""Losses and gradients of the same tensors in grpocli and in the own functions of verl, NeMo RL, slime and others."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from parity.peer_cases import LOSSES, PeerCase, overrides
from parity.peers import SEEDS, built, compare, ours, random_rows
from parity.table import Table


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_loss_and_gradient_are_the_peers(case: PeerCase, peer_table: Table) -> None:
    for seed in SEEDS:
        compare(peer_table, case, random_rows(seed, case.rows))


def test_no_two_of_our_definitions_are_the_same() -> None:
    """Otherwise a comparison could pass without reaching the bound that it tests."""
    several = [random_rows(seed) for seed in SEEDS]
    values = {
        words: torch.stack([ours(built(words), rows) for rows in several])
        for words in {overrides(case.ours): case.ours for case in LOSSES}.values()
    }
    for (one, first), (other, second) in combinations(values.items(), 2):
        assert (first - second).abs().max() > 1e-4, f"{one} and {other}"
