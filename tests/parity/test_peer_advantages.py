"""Advantages of the same scores in grpocli and in the own functions of verl, NeMo RL and SkyRL."""

from __future__ import annotations

import pytest
import torch
from parity.peer_cases import ADVANTAGES, PeerCase
from parity.peer_sides import mask_of
from parity.peers import GROUP, SEEDS, built, side
from parity.table import Table

GROUPS = 6


@pytest.mark.parametrize("case", ADVANTAGES, ids=str)
def test_advantages_are_the_peers(case: PeerCase, peer_table: Table) -> None:
    algorithm = built(f"algorithm=grpo {case.ours}")
    dtype = torch.float32 if case.single else torch.float64
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        scores_PG = torch.rand(GROUPS, GROUP, generator=generator, dtype=torch.float64)
        scores_PG[:2] = scores_PG[:2].round()  # right and wrong answers
        scores_PG[2] = 0.5  # a constant group
        lengths_PG = torch.randint(1, 8, (GROUPS, GROUP), generator=generator)
        theirs_PGT = side(case.peer).advantages(scores_PG, lengths_PG, **case.settings)
        mask_PGT = mask_of(lengths_PG).reshape(GROUPS, GROUP, -1)
        ours_PGT = algorithm.advantages({"score": scores_PG}, lengths=lengths_PG).unsqueeze(2) * mask_PGT
        assert ours_PGT.count_nonzero() > GROUP
        peer_table.compare(f"{case}, advantages", "value", ours_PGT, theirs_PGT * mask_PGT, dtype)
