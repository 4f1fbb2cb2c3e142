"""The repetition penalty: logits of tokens that were seen already, made less likely (above 1) or likelier (below 1).

A token is seen where it stands in the prompt or earlier in the completion. Keskar et al. 2019 (CTRL), as transformers
and vLLM compute it: before the temperature, a positive logit is divided by the penalty, a negative one multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def penalised(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    """Logits [N, V] with those of seen tokens penalised."""
    lower_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, lower_NV, logits_NV)


def first_seen(input_ids_BL: Tensor, attention_mask_BL: Tensor, completion: int, vocabulary: int) -> Tensor:
    """[B, V]: the place in the completion, the row's last `completion` tokens, where each token first stands.

    -1 where it stands in the prompt, `completion` where it does not stand at all; padding does not count. So at place
    t of the completion the seen tokens are those with `first < t`.
    """
    length = input_ids_BL.shape[1]
    place_L = (torch.arange(length, device=input_ids_BL.device, dtype=torch.int32) - (length - completion)).clamp(
        min=-1
    )
    place_BL = torch.where(attention_mask_BL.bool(), place_L, completion)
    first_BV = place_BL.new_full((len(input_ids_BL), vocabulary), completion)
    return first_BV.scatter_reduce_(1, input_ids_BL, place_BL, "amin")
