"""`grpocli.build_algorithm` in a trainer of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpocli
from grpocli.errors import ConfigError

ALONE = """
import sys
for name in ("vllm", "transformers", "accelerate", "datasets", "grpocli.cli", "grpocli.commands"):
    sys.modules[name] = None  # importing it raises
import torch, grpocli
algo = grpocli.build_algorithm("algorithm=dapo", "algorithm.objective.high=0.3")
advantages = algo.advantages({"r": torch.tensor([[0.0, 1.0]])})
loss, metrics = algo.loss(torch.zeros(2, 3), torch.zeros(2, 3), advantages.reshape(-1), torch.ones(2, 3))
print(algo.objective.high, float(loss), sorted(metrics)[0])
"""


def test_it_needs_neither_vllm_nor_transformers_nor_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[0] == "0.3", done.stderr
    assert done.returncode == 0


def test_a_hydra_app_keeps_its_own_hydra(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    (tmp_path / "mine.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert grpocli.build_algorithm("algorithm=drgrpo").kl.beta == 0
        with pytest.raises(ConfigError):
            grpocli.build_algorithm("algorithm=dr_grpo")
        with pytest.raises(ConfigError):
            grpocli.build_algorithm("algorithm.keeep=1")
        assert compose("mine").x == 1


@pytest.mark.parametrize("missing", ["ref_logp", "entropy", "selected"])
def test_what_loss_needs_and_does_not_get(missing: str) -> None:
    algorithm = grpocli.build_algorithm(
        *["algorithm=grpo", "algorithm/tokens=top_entropy", "algorithm/entropy=bonus"][
            : 1 if missing == "ref_logp" else 3
        ]
    )
    rows = torch.zeros(2, 3)
    given = {"ref_logp": rows, "entropy": rows, "selected": rows > 0}
    del given[missing]
    totals = algorithm.totals(torch.ones(2), torch.ones(2, 3)) if missing == "selected" else None
    with pytest.raises(ValueError, match=rf"needs loss\({missing}=...\)"):
        algorithm.loss(rows, rows, torch.ones(2), torch.ones(2, 3), totals=totals, **given)
