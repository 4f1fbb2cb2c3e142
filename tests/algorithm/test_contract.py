"""Parts of users keep their contract, or are refused with it before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpocli.algorithm.aggregate import Constant
from grpocli.algorithm.algorithm import PARTS
from grpocli.algorithm.contract import try_part
from grpocli.composition.checks import check_files
from grpocli.composition.compose import build_run, compose
from grpocli.config.parts import registered
from grpocli.errors import ConfigError

LOSS = "-(a - b).exp() * c[:, None]"
WHOLE = "(a, b, c, d)"
PARTS_OF_USERS = {
    "a tensor": ("objective", WHOLE, LOSS, True),
    "with flags": ("objective", WHOLE, f"({LOSS}, {{'low': a > b}})", True),
    "flags of rows": ("objective", WHOLE, f"({LOSS}, {{'low': c > 0}})", True),
    "no flags": ("objective", WHOLE, f"({LOSS}, None)", True),
    "a scalar": ("objective", WHOLE, "(a * d).sum()", False),
    "rows": ("objective", WHOLE, "(a * d).sum(1)", False),
    "detached": ("objective", WHOLE, "a.detach()", False),
    "a number": ("objective", WHOLE, "1.0", False),
    "wrong flags": ("objective", WHOLE, f"({LOSS}, {{'low': a.sum()}})", False),
    "wrong broadcast": ("objective", WHOLE, "a * c", False),
    "advantages": ("advantage", "(a,)", "a - a.mean(1, keepdim=True)", True),
    "means": ("advantage", "(a,)", "a.mean(1)", False),
    "weights": ("aggregate", "(a, b, c)", "1 / a.sum(1)", True),
    "one weight": ("aggregate", "(a, b, c)", "a.sum()", False),
    "kept": ("keep", "(a,)", "a.std(1) > 0", True),
    "kept completions": ("keep", "(a,)", "a > 0", False),
}


@pytest.mark.parametrize("what", PARTS_OF_USERS)
def test_a_part_of_a_user_is_tried(what: str, tmp_path: Path) -> None:
    kind, arguments, result, kept = PARTS_OF_USERS[what]
    file = tmp_path / "mine.py"
    more = "reward = None; mask_truncated = False; " if kind == "keep" else ""
    file.write_text(f"class Mine:\n    {more}\n    def __call__(self, {arguments[1:-1]}): return {result}\n")
    run = build_run(compose([f"algorithm/{kind}={file}:Mine"]))
    if kept:
        check_files(run)
    else:
        with pytest.raises(ConfigError) as raised:
            check_files(run)
        assert raised.value.key == f"algorithm/{kind}"
        assert "AttributeError" not in str(raised.value)


@pytest.mark.parametrize("kind", PARTS)
def test_the_built_in_parts_keep_the_contract(kind: str) -> None:
    classes = registered(f"algorithm/{kind}").values()
    tried = [part for part in (cls(length=8) if cls is Constant else cls() for cls in classes) if callable(part)]
    assert tried
    for part in tried:
        try_part(kind, part)


def test_a_plain_tensor_is_the_same_loss(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"class Plain:\n    def __call__(self, a, b, c, d): return {LOSS}\n"
        f"class Pair:\n    def __call__(self, a, b, c, d): return {LOSS}, {{}}\n"
    )
    logp_BT = -torch.rand(2, 3, generator=torch.manual_seed(0))
    losses = []
    for name in ("Plain", "Pair"):
        algorithm = build_run(compose([f"algorithm/objective={file}:{name}", "algorithm/kl=none"])).algorithm
        rows = (logp_BT, logp_BT - 0.1, torch.tensor([1.0, -1.0]), torch.ones(2, 3))
        losses.append(algorithm.loss(*rows)[0].item())
        assert not algorithm.clipped(*rows).any()
    assert losses[0] == losses[1]
