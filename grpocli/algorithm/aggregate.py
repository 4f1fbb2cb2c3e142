"""Aggregations of token losses into one number: each is a weight for the sum over a row's tokens.

    loss = sum_i weight_i x sum_t loss_it

The weights [B] are float64. They are divided by counts of the whole optimizer window (`Totals`), so the sum over
micro-batches and processes does not depend on how the rows are split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpocli.config.parts import interpolate, one_of, part, require

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over one optimizer window: all rows of one update, over all micro-batches and processes.

    group_ids [N] sorted, group_tokens [N], group_informative [N] (any advantage not 0): a count for each group.
    """

    rows: int
    """All rows, including those without a token in the loss."""
    tokens: int
    """Tokens in the loss."""
    group_ids: Tensor
    group_tokens: Tensor
    group_informative: Tensor
    micro_batches: int = 1
    """Number of micro-batches over all processes (`scope=micro_batch` only)."""
    skipped: int = 0
    """Tokens of rows that are not computed, because they have no gradient."""
    rows_in_loss: int = 0
    """Rows with a token in the loss."""

    @classmethod
    def of(cls, advantages_B: Tensor, lengths_B: Tensor, group_ids_B: Tensor, micro_batches: int = 1) -> Totals:
        """The counts of rows. lengths_B: tokens in the loss."""
        ids_N, index_B = group_ids_B.unique(return_inverse=True)
        tokens_N = lengths_B.long().new_zeros(len(ids_N)).index_add(0, index_B, lengths_B.long())
        informative_N = tokens_N.new_zeros(len(ids_N)).index_add(0, index_B, (advantages_B != 0).long()) > 0
        return cls(
            rows=len(group_ids_B),
            tokens=int(tokens_N.sum()),
            group_ids=ids_N,
            group_tokens=tokens_N,
            group_informative=informative_N,
            micro_batches=micro_batches,
            rows_in_loss=int((lengths_B > 0).sum()),
        )

    def to(self, device: torch.device) -> Totals:
        """The same counts on another device."""
        names = ("group_ids", "group_tokens", "group_informative")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def index(self, group_ids_B: Tensor) -> Tensor:
        """The position of each row's group in `group_ids`."""
        return (group_ids_B.unsqueeze(1) > self.group_ids.unsqueeze(0)).sum(1)


@part("algorithm/aggregate", "sequence_mean")
class SequenceMean:
    """Mean over rows of the mean over tokens: 1 / (rows |o_i|). GRPO (arXiv 2402.03300), equation 3."""

    needs_groups = False
    depends_on_split = False

    def __call__(self, mask_BT: Tensor, group_ids_B: Tensor, totals: Totals) -> Tensor:
        return 1.0 / (max(totals.rows, 1) * mask_BT.sum(1).clamp(min=1).double())


@part("algorithm/aggregate", "token_mean")
class TokenMean:
    """Mean over tokens."""

    scope: str = "batch"
    """Tokens that the mean runs over. `batch`: all tokens of the update. `group`: each group's tokens, then the mean
    over groups (DAPO, arXiv 2503.14476, equation 8). `micro_batch`: each micro-batch's tokens, then the mean over
    micro-batches, which depends on the split; only to reproduce trainers that do so."""
    informative_only: bool = False
    """Leave out tokens and groups whose advantages are all 0 (MathForge, arXiv 2601.20614)."""

    def __post_init__(self) -> None:
        one_of(self, "scope", ("batch", "group", "micro_batch"))

    @property
    def needs_groups(self) -> bool:
        """Whether a row's weight depends on its group."""
        return self.informative_only or self.scope == "group"

    @property
    def depends_on_split(self) -> bool:
        """Whether a row's weight depends on which rows share its micro-batch."""
        return self.scope == "micro_batch"

    def __call__(self, mask_BT: Tensor, group_ids_B: Tensor, totals: Totals) -> Tensor:
        index_B = totals.index(group_ids_B)
        counted_N = totals.group_informative if self.informative_only else totals.group_tokens >= 0
        counted_B = counted_N[index_B]
        if self.scope == "group":
            denominator_B = totals.group_tokens[index_B].clamp(min=1) * counted_N.sum().clamp(min=1)
        elif self.scope == "batch":
            denominator_B = (totals.group_tokens * counted_N).sum().clamp(min=1).expand(len(index_B))
        else:
            here = (mask_BT.sum(1) * counted_B).sum().clamp(min=1)
            denominator_B = (here * totals.micro_batches).expand(len(index_B))
        return counted_B / denominator_B.double()


@part("algorithm/aggregate", "constant")
class Constant:
    """1 / (rows x length): no bias by length. Dr. GRPO (arXiv 2503.20783), section 3.1."""

    length: int | None = interpolate("rollout.max_completion_tokens")
    """Divisor of every completion's sum over tokens, in tokens; any constant will do."""
    needs_groups = False
    depends_on_split = False

    def __post_init__(self) -> None:
        require(self, "length", self.length is None or self.length >= 1, "must be at least 1")

    def __call__(self, mask_BT: Tensor, group_ids_B: Tensor, totals: Totals) -> Tensor:
        if self.length is None:
            raise ValueError("the part algorithm/aggregate=constant needs algorithm.aggregate.length=...")
        return mask_BT.new_ones(len(mask_BT)).double() / (max(totals.rows, 1) * self.length)
