"""What the parts of an algorithm get and return: those of users are tried with it."""

from __future__ import annotations

from typing import Any

from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.objective import loss_and_flags
from grpocli.config.user_code import REQUIRED_MEMBERS, choice_of, raised
from grpocli.errors import ConfigError

SIZES = {"P": 2, "G": 4, "B": 3, "T": 5}
"""Sizes of the trial."""
RETURNS = {
    "advantage": "advantages [P, G]",
    "aggregate": "a weight of each row [B]",
    "correction": "a weight of each token [B, T]",
    "entropy": "a bonus of each token [B, T]",
    "keep": "whether a group trains [P]",
    "kl": "an estimate of each token [B, T]",
    "objective": "the loss of each token, with its gradient, alone or as (loss, {name: flags [B, T] or [B]}): [B, T]",
    "question_weight": "a weight of each group [P]",
    "tokens": "whether a token counts [B, T]",
}
"""{part: what it returns}, which ends with the shape."""
GETS = {"scores": "[P, G]", "accuracy": "[P, G]", "rewards": "[P, G]", "advantages": "[B] or [B, T]"}
GETS |= {"group_ids": "[B]", "totals": "(counts of the window)"}
"""{argument: its shape}; [B, T] for all others."""


def try_part(kind: str, part: Any) -> None:
    """Call a part with small tensors. Raises ConfigError with the contract if it fails or returns something else."""
    import torch

    B, T, names = SIZES["B"], SIZES["T"], str(REQUIRED_MEMBERS[f"algorithm/{kind}"]["__call__"]).split()
    scores_PG = torch.arange(8.0).reshape(SIZES["P"], SIZES["G"]) % 3
    logp_BT = -torch.linspace(0.1, 1, B * T).reshape(B, T).requires_grad_()
    given: dict[str, Any] = {name: scores_PG for name, shape in GETS.items() if shape == "[P, G]"}
    given |= {"logp": logp_BT, "mask": torch.ones(B, T), "advantages": torch.ones(B), "group_ids": torch.arange(B)}
    given["totals"] = Totals.of(given["advantages"], given["mask"].sum(1), given["group_ids"])
    lengths = [scores_PG] if getattr(part, "needs_lengths", False) else []
    shape = [SIZES[letter] for letter in RETURNS[kind].rpartition("[")[2].rstrip("]").split(", ")]
    try:
        found, flags = loss_and_flags(part(*[given.get(name, logp_BT.detach()) for name in names], *lengths))
        whole = found.expand(shape) if kind in ("correction", "entropy", "kl") else found
        wrong = {"it": found} if list(whole.shape) != shape else {n: one for n, one in flags.items() if len(one) != B}
        problem = ", ".join(f"{name} has the shape {list(one.shape)}" for name, one in wrong.items())
        if kind == "objective" and not found.requires_grad:
            problem = problem or "its loss has no gradient"
    except Exception as error:  # noqa: BLE001 - of the user's code, or of a result that is no tensor
        problem = raised(error)
    if problem:
        gets = ", ".join(f"{name} {GETS.get(name, '[B, T]')}" for name in names)
        problem = f"gets ({gets}) and returns {RETURNS[kind]}; in a trial with {SIZES}: {problem}"
        raise ConfigError(problem, key=f"algorithm/{kind}", value=choice_of(f"algorithm/{kind}", part))
