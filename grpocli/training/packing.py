"""What a model allows: rows end to end, and log-probs at its output head. Asked of it, and tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpocli.data import Sampling
from grpocli.training import attention
from grpocli.training.batch import MicroBatch, Row
from grpocli.training.layout import Layout, Packed, Padded
from grpocli.training.policy import completion_logp

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.training.policy import Policy
    from grpocli.training.reference import Reference
    from grpocli.training.world import World


CLOSE = 0.05
"""Relative difference of the two layouts' log-probs. bfloat16 makes 0.03 of it, where it cannot be left out."""
EQUAL = 1e-4
"""The same, where both are float32."""


def find_head(policy: Policy, world: World) -> bool:
    """Whether the model's logits are what its output head returns; some scale or cap them. Collective."""
    row = _rows(policy)[-1]
    ids = torch.tensor([row.prompt_ids + row.completion_ids], device=policy.model.device)
    start = len(row.prompt_ids)
    with torch.no_grad(), policy.parallel.computing(policy.model, torch.float32):
        logits_1TV = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logp_1T = logits_1TV[:, start - 1 : -1].float().log_softmax(-1).gather(2, ids[:, start:, None]).squeeze(2)
    batch = MicroBatch.build([row], policy.model.device)
    with torch.no_grad():
        context = policy.parallel.computing(policy.model, torch.float32)
        found_1T, _ = completion_logp(policy.model, batch, Sampling(1), context)
    close = EQUAL if logits_1TV.dtype == torch.float32 else CLOSE
    policy.at_head = not world.any(_far(found_1T, logp_1T, close))
    return policy.at_head


def _far(one: Tensor, other: Tensor, close: float) -> bool:
    return bool((one - other).abs().mean() > close * other.abs().mean())


def pack(policy: Policy, reference: Reference | None, world: World | None = None) -> bool:
    """Have both models take rows end to end, if they give the log-probs that they give side by side. Collective."""
    models = [policy.model, *([reference.model] if reference else [])]
    if not all(attention.choose(model) for model in models):
        return False
    agreed = agrees(policy)
    policy.packs = not world.any(not agreed) if world else agreed
    if not policy.packs:
        for model in models:
            model.set_attn_implementation("sdpa")
    return policy.packs


@torch.no_grad()
def agrees(policy: Policy) -> bool:
    """Try it with a few tokens. Collective."""
    rows, found = _rows(policy), []
    kinds: tuple[type[Layout], ...] = (Packed, Padded)
    for layout in kinds:
        batch = MicroBatch.build(rows, policy.model.device, layout)
        try:
            context = policy.parallel.computing(policy.model, torch.float32)
            logp_BT = completion_logp(policy.model, batch, Sampling(1), context, at_head=policy.at_head)[0]
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except (TypeError, ValueError, RuntimeError):  # a model that does not know what to do with segments
            return False
        found.append(logp_BT[batch.mask.bool()])
    return not _far(found[0], found[1], CLOSE)


def _rows(policy: Policy) -> list[Row]:
    """Two groups of two."""
    ids = [k % policy.model.config.get_text_config().vocab_size for k in range(3, 30)]
    return [Row(ids[:5], ids[5 : 9 + 3 * k], [1] * (4 + 3 * k), 0.0, k // 2, [0.0] * (4 + 3 * k)) for k in range(4)]
