"""A row: one completion to train on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpocli.types import Rollout


@dataclass(slots=True)
class Row:
    """One completion to train on. Log-probs and entropies are per completion token, in nats, without gradient.

    group: which group of the step it belongs to. mask: 1 for tokens in the loss. old_logp: None while the policy is
    still the one whose log-probs they are. selected: tokens of the policy-gradient term (None: all).
    logp, entropy: under the policy that begins the step; None until they are computed.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    advantage: float
    group: int
    rollout_logp: list[float]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    logp: Tensor | None = None
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
