"""Parts of users keep their contract, or are refused with it before anything is loaded."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from composed import built

from grpocli.algorithm.aggregate import Constant
from grpocli.algorithm.algorithm import PARTS
from grpocli.algorithm.contract import try_part
from grpocli.composition.checks import check_files
from grpocli.composition.compose import build_run, compose
from grpocli.config.parts import CLASSES, choices_of
from grpocli.errors import ConfigError

LOSS = "-(a - b).exp() * c[:, None]"
PARTS_OF_USERS = [  # kind, arguments, result, whether it is as the contract says
    ("objective", "a, b, c, d", LOSS, True),
    ("objective", "a, b, c, d", f"({LOSS}, {{'low': c > 0}})", True),
    ("objective", "a, b, c, d", "(a * d).sum()", False),
    ("objective", "a, b, c, d", "a.detach()", False),
    ("objective", "a, b, c, d", "1.0", False),
    ("objective", "a, b, c, d", f"({LOSS}, {{'low': a.sum()}})", False),
    ("advantage", "a", "a - a.mean(1, keepdim=True)", True),
    ("advantage", "a", "a.mean(1)", False),
    ("aggregate", "a, b, c", "1 / a.sum(1)", True),
    ("aggregate", "a, b, c", "a.sum()", False),
    ("keep", "a", "a.std(1) > 0", True),
    ("keep", "a", "a > 0", False),
]


@pytest.mark.parametrize(("kind", "arguments", "result", "kept"), PARTS_OF_USERS)
def test_a_part_of_a_user_is_tried(kind: str, arguments: str, result: str, kept: bool) -> None:
    with nullcontext() if kept else pytest.raises(ConfigError) as raised:
        try_part(kind, eval(f"lambda {arguments}: {result}"))
    if not kept:
        assert raised.value.key == f"algorithm/{kind}"


def test_a_part_of_a_user_is_tried_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def __call__(self, a): return a.mean(1)\n")
    with pytest.raises(ConfigError) as raised:
        check_files(build_run(compose([f"algorithm/advantage={tmp_path / 'mine.py'}:Mine"])))
    assert raised.value.key == "algorithm/advantage"


@pytest.mark.parametrize("kind", PARTS)
def test_the_built_in_parts_keep_the_contract(kind: str) -> None:
    classes = [CLASSES[f"algorithm/{kind}/{choice}"] for choice in choices_of(f"algorithm/{kind}")]
    tried = [part for part in (cls(length=8) if cls is Constant else cls() for cls in classes) if callable(part)]
    assert tried
    for part in tried:
        try_part(kind, part)


def test_a_plain_tensor_is_the_same_loss() -> None:
    logp_BT = -torch.rand(2, 3, generator=torch.manual_seed(0))
    rows = (logp_BT, logp_BT - 0.1, torch.tensor([1.0, -1.0]), torch.ones(2, 3))
    plain = replace(built("algorithm=dapo"), objective=lambda a, b, c, d: -(a - b).exp() * c[:, None])
    pair = replace(plain, objective=lambda *given: (plain.objective(*given), {}))
    assert plain.loss(*rows)[0].item() == pair.loss(*rows)[0].item()
    assert not plain.clipped(*rows).any()
