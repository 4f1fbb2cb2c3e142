"""`grpocli.build_algorithm` in a trainer of the user."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composed import built

import grpocli
from grpocli.errors import ConfigError

ALONE = """
import sys
for name in ("vllm", "transformers", "accelerate", "datasets", "grpocli.cli", "grpocli.cli"):
    sys.modules[name] = None  # importing it raises
import torch, grpocli
algo = grpocli.build_algorithm("algorithm=dapo", "algorithm.objective.high=0.3")
advantages = algo.advantages({"r": torch.tensor([[0.0, 1.0]])})
loss, metrics = algo.loss(torch.zeros(2, 3), torch.zeros(2, 3), advantages.reshape(-1), torch.ones(2, 3))
print(algo.objective.high, float(loss), sorted(metrics)[0])
"""


@pytest.mark.processes
def test_the_api_needs_neither_vllm_nor_transformers_nor_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[0] == "0.3", done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_a_hydra_app_keeps_its_own_hydra(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    (tmp_path / "mine.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert grpocli.build_algorithm("algorithm=drgrpo").kl.beta == 0
        with pytest.raises(ConfigError):
            grpocli.build_algorithm("algorithm.keeep=1")
        assert compose("mine").x == 1


@pytest.mark.parametrize("missing", ["ref_logp", "entropy", "selected"])
def test_a_missing_argument_of_loss_is_named(missing: str) -> None:
    more = [] if missing == "ref_logp" else ["algorithm/tokens=top_entropy", "algorithm/entropy=bonus"]
    algorithm, rows = built("algorithm=grpo", *more), torch.zeros(2, 3)
    given = {"ref_logp": rows, "entropy": rows, "selected": rows > 0}
    del given[missing]
    totals = algorithm.totals(torch.ones(2), torch.ones(2, 3)) if missing == "selected" else None
    with pytest.raises(ValueError, match=rf"needs loss\({missing}=...\)"):
        algorithm.loss(rows, rows, torch.ones(2), torch.ones(2, 3), totals=totals, **given)


ROWS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("shapes", "weights", "named"),
    [
        ({}, None, "reward"),
        ({"r": (2,)}, None, "'r'"),
        ({"r": (2, 2), "s": (1, 2)}, None, "'s'"),
        ({"math": (2, 2)}, {"maht": 2.0}, "maht.*math"),
    ],
)
def test_rewards_of_a_wrong_shape_are_refused(shapes, weights, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        built("algorithm=grpo").advantages({name: torch.zeros(shape) for name, shape in shapes.items()}, weights)


def test_integer_and_boolean_rewards() -> None:
    algorithm, values = built("algorithm=dgpo"), torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    expected = algorithm.advantages({"r": values.float()})
    assert algorithm.advantages({"r": values}).equal(expected)
    assert algorithm.advantages({"r": values.bool()}).equal(expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("old_logp", (4, 1)),
        ("mask", (4, 1)),
        ("ref_logp", (1, 3)),
        ("rollout_logp", (3,)),
        ("entropy", (3, 3)),
        ("advantages", (1,)),
        ("advantages", (2, 2)),
        ("group_ids", (3,)),
    ],
)
def test_shapes_that_would_be_broadcast_are_refused(name: str, shape: tuple[int, ...]) -> None:
    given = {"old_logp": ROWS, "advantages": torch.zeros(4), "mask": torch.ones(4, 3), "ref_logp": ROWS}
    given[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"loss\({name}=\.\.\.\) has the shape"):
        built("algorithm=grpo").loss(ROWS, **given)


@pytest.mark.parametrize(
    "aggregate", [[], ["algorithm.aggregate.informative_only=false", "algorithm.aggregate.scope=group"]]
)
def test_a_part_of_a_window_needs_its_group_ids(aggregate: list[str]) -> None:
    algorithm = built("algorithm=dgpo", *aggregate)
    advantages, ids = torch.tensor([0.0, 0.0, 1.0, -2.0]), torch.tensor([7, 7, 9, 9])
    totals = algorithm.totals(advantages, torch.ones(4, 3), ids)
    part = [ROWS[2:], ROWS[2:], advantages[2:], torch.ones(2, 3)]
    assert algorithm.loss(*part, group_ids=ids[2:], totals=totals)[0].item() == pytest.approx(
        0.5 if not aggregate else 0.25
    )
    with pytest.raises(ValueError, match=r"needs loss\(group_ids=\.\.\.\)"):
        algorithm.loss(*part, totals=totals)


@pytest.mark.parametrize("choice", ["algorithm=grpo", "algorithm=dapo"])
def test_group_ids_are_optional_if_groups_do_not_matter(choice: str) -> None:
    algorithm = built(choice, "algorithm/kl=none")
    advantages = torch.tensor([0.0, 0.0, 1.0, -2.0])
    totals = algorithm.totals(advantages, torch.ones(4, 3))
    parts = [
        algorithm.loss(ROWS[i], ROWS[i], advantages[i], torch.ones(2, 3), totals=totals)[0] for i in ([0, 1], [2, 3])
    ]
    whole, _ = algorithm.loss(ROWS, ROWS, advantages, torch.ones(4, 3))
    assert sum(parts).item() == pytest.approx(whole.item())


@pytest.mark.slow
def test_a_length_from_the_default_run_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert grpocli.build_algorithm("algorithm=drgrpo", "algorithm.aggregate.length=3000").aggregate.length == 3000
        assert grpocli.build_algorithm("algorithm=drgrpo", "rollout.max_completion_tokens=7").aggregate.length == 7
        grpocli.build_algorithm("algorithm=dapo")
        assert caplog.text == ""
        grpocli.build_algorithm("algorithm=drgrpo")
    assert "algorithm.aggregate.length is 8, rollout.max_completion_tokens of grpocli's default run" in caplog.text
