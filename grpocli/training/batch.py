"""From rollouts to micro-batches: ragged until the moment one is built, dealt to processes by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from grpocli.data import Rollout


@dataclass(slots=True)
class Row:
    """One completion to train on. Log-probs are per completion token, on the training device, without gradient.

    group: which group of the step it belongs to. mask: 1 for tokens in the loss.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    advantage: float
    group: int
    rollout_logp: list[float]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @classmethod
    def of(cls, rollout: Rollout, advantage: float, group: int, mask_truncated: bool) -> Row:
        done = rollout.completion
        n = len(done.token_ids)
        mask = [0] * n if mask_truncated and done.truncated else (done.mask or [1] * n)
        return cls(rollout.prompt.token_ids, done.token_ids, mask, advantage, group, done.logprobs)


EMPTY = Row([0], [0], [0], 0.0, -1, [0.0])
"""Adds nothing: keeps a process that has run out of rows in step with the others' collective calls."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows side by side: prompts padded on the left, completions on the right, so that completions align.

    input_ids, attention_mask, position_ids [B, L]; completion_ids, mask, rollout_logp, old_logp, ref_logp [B, T];
    advantages, group_ids [B].
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    completion_ids: Tensor
    mask: Tensor
    advantages: Tensor
    group_ids: Tensor
    rollout_logp: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device) -> MicroBatch:
        prompts_BL = _pad([torch.tensor(r.prompt_ids) for r in rows], left=True)
        prompt_mask_BL = _pad([torch.ones(len(r.prompt_ids), dtype=torch.long) for r in rows], left=True)
        ids_BT = _pad([torch.tensor(r.completion_ids) for r in rows])
        present_BT = _pad([torch.ones(len(r.completion_ids), dtype=torch.long) for r in rows])
        attention_mask = torch.cat([prompt_mask_BL, present_BT], 1)
        return cls(
            input_ids=torch.cat([prompts_BL, ids_BT], 1).to(device),
            attention_mask=attention_mask.to(device),
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0).to(device),
            completion_ids=ids_BT.to(device),
            mask=_pad([torch.tensor(r.mask) for r in rows]).to(device),
            advantages=torch.tensor([r.advantage for r in rows], device=device),
            group_ids=torch.tensor([r.group for r in rows], device=device),
            rollout_logp=_pad([torch.tensor(r.rollout_logp) for r in rows]).to(device),
            old_logp=_pad_optional([r.old_logp for r in rows]),
            ref_logp=_pad_optional([r.ref_logp for r in rows]),
        )


def _pad(values: Sequence[Tensor], left: bool = False) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_side="left" if left else "right")


def _pad_optional(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [v for v in values if v is not None]
    return _pad(present) if len(present) == len(values) else None


def windows(n_groups: int, minibatches: int) -> list[range]:
    """The groups of each optimizer update of a pass: as equal as can be, none empty unless there are too few."""
    pieces = min(minibatches, n_groups)
    edges = [n_groups * i // pieces for i in range(pieces + 1)] if pieces else []
    return [range(a, b) for a, b in pairwise(edges)]


def deal(rows: Sequence[Row], processes: int) -> list[list[Row]]:
    """Rows for each process, balanced by tokens: longest first, to whoever has least. The same in every process."""
    shares: list[list[Row]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for row in sorted(rows, key=lambda r: -r.n_tokens):
        poorest = loads.index(min(loads))
        shares[poorest].append(row)
        loads[poorest] += row.n_tokens
    return shares


def pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Micro-batches of at most max_tokens tokens, padding included; rows of like shape together."""
    batches: list[list[Row]] = []
    prompt = completion = 0
    for row in sorted(rows, key=lambda r: (len(r.completion_ids), len(r.prompt_ids))):
        prompt = max(prompt, len(row.prompt_ids))
        completion = max(completion, len(row.completion_ids))
        if not batches or (len(batches[-1]) + 1) * (prompt + completion) > max_tokens:
            batches.append([])
            prompt, completion = len(row.prompt_ids), len(row.completion_ids)
        batches[-1].append(row)
    return batches
