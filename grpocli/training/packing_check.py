"""Tests on the loaded model whether it supports packed rows and log-probs at its output head."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from grpocli.models import shared_prompt_attention as attention
from grpocli.training.logprobs import completion_logp, marked, output_head
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.packing import FlexPacked, Layout, Packed, Padded
from grpocli.training.sequence_shard import shards_of
from grpocli.training.teachers import LoadedTeacher, Teachers, loaded_teachers
from grpocli.types import Row, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.distributed.world import World
    from grpocli.models.shared_prompt_attention import Attends
    from grpocli.training.policy import Policy, Reference

logger = logging.getLogger(__name__)

BFLOAT16_TOLERANCE = 0.05
"""Largest relative difference of log-probs between packed and padded rows in bfloat16, whose rounding gives 0.03."""
FLOAT32_TOLERANCE = 1e-4
"""The same in float32."""


def find_head(owner: Policy | LoadedTeacher, world: World) -> bool:
    """Set and return whether the model's logits are exactly the output of its output head. Collective."""

    def tried() -> bool:
        logits, mark = _marked(owner)
        return logits.shape == mark.shape and torch.equal(logits.float(), mark.float())

    owner.at_head = not world.any(output_head(owner.model) is None or not passes(tried))
    return owner.at_head


def _marked(policy: Policy | LoadedTeacher) -> tuple[Tensor, Tensor]:
    head = output_head(policy.model)
    assert head is not None
    with policy.parallel.autocast(policy.model, torch.float32):
        return marked(head, policy.model)


def pack(
    policy: Policy, reference: Reference | Teachers | None, world: World | None = None, longest: int = sys.maxsize
) -> bool:
    """Switch all models to packed rows if that gives the log-probs of padded rows; return whether it does. Collective.

    longest: the most tokens of a row. A reference that is not a teacher has the policy's architecture.
    """
    models = [policy.model, *(reference.models if reference else [])]
    tested: list[Policy | LoadedTeacher] = [policy, *loaded_teachers(reference)]
    heads = all(output_head(one.model) is not None for one in tested)
    agreed = all(attention.enable(model, longest) for model in models) and heads
    if agreed:
        agreed = passes(lambda: all(agrees(one, policy.packed, policy.dtype) for one in tested))
    policy.packs = not world.any(not agreed) if world else agreed
    if not policy.packs:
        for model in models:
            attention.disable(model)
    return policy.packs


def passes(test: Callable[[], bool]) -> bool:
    """The answer of a test; False if the model raises. Errors of the machine are raised."""
    try:
        return test()
    except (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError):
        raise
    except (TypeError, ValueError, IndexError, RuntimeError):
        logger.info("a test of the model raised an error, which counts as no", exc_info=True)
        return False


def agrees(policy: Policy | LoadedTeacher, layout: type[Packed] = Packed, dtype: torch.dtype = torch.float32) -> bool:
    """Whether packed and padded rows have the same log-probs, and packed rows do not influence each other.

    dtype: of updates. `flex_attention` has another kernel in each dtype, and is tried in this one, too.
    """
    rows = trial_rows(policy)
    exact = _marked(policy)[1].dtype == torch.float32
    padded, tolerance = _logp(policy, rows, Padded), FLOAT32_TOLERANCE if exact else BFLOAT16_TOLERANCE
    packed = _logp(policy, rows, layout)
    if not is_close(packed, padded, tolerance):
        return False
    shared = shards_of(policy.shared_with, layout) if policy.shared_with else None
    if shared and not is_close(_logp(policy, rows, shared), padded, tolerance):
        return False
    if layout is FlexPacked and exact and dtype != torch.float32:
        padded = _logp(policy, rows, Padded, dtype)
        tried = (_logp(policy, rows, one, dtype) for one in (layout, shared) if one)
        if not all(is_close(logp, padded, BFLOAT16_TOLERANCE) for logp in tried):
            return False
    first = len(rows[0].completion_ids)
    other = replace(rows[0], completion_ids=rows[0].completion_ids[::-1])
    return torch.equal(_logp(policy, [other, *rows[1:]], layout)[first:], packed[first:])


@dataclass(frozen=True, slots=True)
class _WithBackward:
    """Attention that runs the backward pass of each call at once, and raises what it raises."""

    attention: Attends

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        with torch.enable_grad():
            query, key, value = (state.detach().requires_grad_() for state in (query, key, value))
            output = self.attention.attend(query, key, value, how)
            torch.autograd.grad(output.sum(), (query, key, value))
        return output.detach()


@torch.no_grad()
def _logp(
    policy: Policy | LoadedTeacher, rows: list[Row], layout: type[Layout], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log-probs of all completion tokens, row by row. Attention of packed rows runs its backward pass, too."""
    batch = MicroBatch.build(rows, policy.model.device, layout)
    if isinstance(batch.layout, Packed):
        batch = replace(batch, layout=replace(batch.layout, segments=_WithBackward(batch.layout.segments)))
    context = policy.parallel.autocast(policy.model, dtype)
    logp_BT, _ = completion_logp(policy.model, batch, Sampling(1), context, at_head=policy.at_head)
    return logp_BT[batch.mask.bool()]


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether the relative difference is at most `tolerance`; False if either is NaN."""
    return bool((a - b).abs().mean() <= tolerance * b.abs().mean())


def trial_rows(policy: Policy | LoadedTeacher) -> list[Row]:
    """Two groups of two rows, one that fits into one block of attention and one that needs two."""
    config = policy.model.config.get_text_config()
    long = min(
        attention.MIN_TOKENS // 2, (getattr(config, "max_position_embeddings", None) or attention.MIN_TOKENS) - 8
    )
    lengths = [4, 7, long, long + 3]
    ids = [k % config.vocab_size for k in range(3, 3 + 5 + max(lengths))]
    return [Row(ids[:5], ids[5 : 5 + n], [1] * n, 0.0, k // 2, [0.0] * n) for k, n in enumerate(lengths)]
