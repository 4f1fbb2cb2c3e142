"""The loss of TRL's defaults equals that of the algorithm that `grpocli from-trl` makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.cases import LENGTH, case, our_loss
from parity.table import Table

from grpocli import build_algorithm
from grpocli_tools.porting.script import of_mapping
from grpocli_tools.porting.trl import Translation

SETTINGS = {
    "TRL's defaults": {},
    "a KL term": {"beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "grpo, clip-higher": {"loss_type": "grpo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.25},  # TRL rounds it to float32
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_is_the_one_of_trl(name: str, table: Table, folder: Path) -> None:
    settings = SETTINGS[name]
    source = of_mapping(Path("grpo.yaml"), {"max_completion_length": LENGTH, **settings})
    lines = Translation(source).translate().lines.values()
    overrides = [line.override for line in lines if line.key.startswith(("algorithm", "rollout.max_completion"))]
    peer = case(name, str(settings.get("loss_type", "dapo")), settings, ()).peer(folder)
    batch = case(name, "dapo", {}, ()).batch(torch.float64, 0)
    peer.sample(batch)
    ours, _ = our_loss(
        build_algorithm(*overrides), batch, batch.logp, batch.entropy, peer.advantages.to(torch.float64), peer.mask
    )
    table.compare(f"from-trl, {name}", "value", ours, torch.stack(peer.losses()).sum(), torch.float64)
