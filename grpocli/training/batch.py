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
    """One completion to train on. Log-probs and entropies are per completion token, in nats, without gradient.

    group: which group of the step it belongs to. mask: 1 for tokens in the loss. old_logp: None while the policy is
    still the one whose log-probs they are. selected: tokens of the policy-gradient term (None: all).
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    advantage: float
    group: int
    rollout_logp: list[float]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    entropy: Tensor | None = None
    selected: Tensor | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @classmethod
    def of(
        cls, rollout: Rollout, advantage: float, group: int, mask_truncated: bool, version: int, corrected: bool = False
    ) -> Row:
        """A row of a step that trains weight version `version`; what an older one sampled is off-policy.

        Its old log-probs are then the sampler's, unless the algorithm corrects for the sampler (`corrected`): the
        correction is from the sampler to the step's start, and the objective's ratio from there on.
        """
        done = rollout.completion
        n = len(done.token_ids)
        mask = [0] * n if mask_truncated and done.truncated else (done.mask or [1] * n)
        old_logp = torch.tensor(done.logprobs) if done.version < version and not corrected else None
        return cls(rollout.prompt.token_ids, done.token_ids, mask, advantage, group, done.logprobs, old_logp)

    @classmethod
    def empty(cls) -> Row:
        """Adds nothing: keeps a process that has run out of rows in step with the others' collective calls."""
        return cls([0], [0], [0], 0.0, -1, [0.0])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows side by side: prompts padded on the left, completions on the right, so that completions align.

    input_ids, attention_mask, position_ids [B, L]; completion_ids, mask, rollout_logp, old_logp, ref_logp, selected
    [B, T]; advantages, group_ids [B]. old_logp is NaN in rows that have none yet.
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
    selected: Tensor | None

    @classmethod
    def build(cls, rows: Sequence[Row], device: torch.device) -> MicroBatch:
        prompts_BL = _pad([torch.tensor(r.prompt_ids) for r in rows], left=True)
        prompt_mask_BL = _pad([torch.ones(len(r.prompt_ids), dtype=torch.long) for r in rows], left=True)
        ids_BT = _pad([torch.tensor(r.completion_ids, dtype=torch.long) for r in rows])
        present_BT = _pad([torch.ones(len(r.completion_ids), dtype=torch.long) for r in rows])
        attention_mask = torch.cat([prompt_mask_BL, present_BT], 1)
        return cls(
            input_ids=torch.cat([prompts_BL, ids_BT], 1).to(device),
            attention_mask=attention_mask.to(device),
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0).to(device),
            completion_ids=ids_BT.to(device),
            mask=_pad([torch.tensor(r.mask, dtype=torch.long) for r in rows]).to(device),
            advantages=torch.tensor([r.advantage for r in rows], device=device),
            group_ids=torch.tensor([r.group for r in rows], device=device),
            rollout_logp=_pad([torch.tensor(r.rollout_logp) for r in rows]).to(device),
            old_logp=_pad_optional(rows, [r.old_logp for r in rows], device),
            ref_logp=_pad_optional(rows, [r.ref_logp for r in rows], device),
            selected=_pad_optional(rows, [r.selected for r in rows], device),
        )


def _pad(values: Sequence[Tensor], left: bool = False) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_side="left" if left else "right")


def _pad_optional(rows: Sequence[Row], values: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """[B, T] with NaN in the rows without a value; None where no row has one."""
    if all(v is None for v in values):
        return None
    unknown = [torch.full((len(r.completion_ids),), float("nan"), device=device) for r in rows]
    return _pad([u if v is None else v.to(device) for u, v in zip(unknown, values, strict=True)])


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
