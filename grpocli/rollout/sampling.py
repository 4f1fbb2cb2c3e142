"""What the sampler, and the trainer that scores its tokens, share: the sampling distribution, seeds and stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpocli.models.loading import end_token_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.types import Sampling

CONTEXT_TOKENS = 6  # prompt tokens decoded with the completion, because they can change how its first tokens decode
REPLACEMENT_CHARACTER = "\ufffd"  # the decoded form of an incomplete character
BLOCK = 64
"""Block size of `draw` in tokens; probabilities inside a block are summed in float32."""
BELOW_1 = 1 - 2**-53
"""The last number before 1 in float64."""


class StopStrings:
    """Detects the token that completes a stop string in a completion, as vLLM does.

    The text is decoded as it grows, after the prompt's last tokens: a token's text depends on its neighbours (spaces,
    the bytes of a character). Special tokens have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self.tokenizer, self.stop = tokenizer, list(stop)
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context_text = self._decode()  # the text of the context tokens
        self._new = len(self._ids)  # the first token whose text is not decoded yet
        self._tail = ""
        # characters before the new ones that may begin a stop string
        self._reach = max(map(len, stop), default=1) - 1

    def completed_by(self, token: int) -> bool:
        """Add the next token; return whether its text completes a stop string."""
        self._ids.append(token)
        text = self._decode()
        if len(text) <= len(self._context_text) or text.endswith(REPLACEMENT_CHARACTER):
            return False
        grown = self._tail + text[len(self._context_text) :]
        self._ids, self._new = self._ids[self._new :], len(self._ids) - self._new
        self._context_text = self._decode()
        self._tail = grown[-self._reach :] if self._reach else ""
        return any(stop in grown for stop in self.stop)

    def _decode(self) -> str:
        # vLLM's options
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def sampling_logits(
    logits_NV: Tensor, sampling: Sampling, keep_N: Tensor | None = None, seen_NV: Tensor | None = None
) -> Tensor:
    """Logits [N, V] (float32) after repetition penalty, temperature, min_p, top_k and top_p, in vLLM's order.

    Truncated tokens have -inf. With temperature 0 the logits are neither scaled nor truncated; the sampler takes the
    argmax. keep_N: tokens that are never truncated, so that a token sampled under slightly different weights keeps a
    finite log-prob. seen_NV: the tokens to penalise (bool); needed unless the penalty is 1.
    """
    logits_NV = logits_NV.float()
    if sampling.repetition_penalty != 1:
        if seen_NV is None:
            raise ValueError("seen_NV is required unless repetition_penalty is 1")
        logits_NV = apply_repetition_penalty(logits_NV, seen_NV, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits_NV
    if sampling.temperature != 1:
        logits_NV = logits_NV / sampling.temperature
    if not sampling.truncates:
        return logits_NV
    truncated_NV = _truncated(logits_NV.detach(), sampling)
    if keep_N is not None:
        truncated_NV = truncated_NV.scatter(1, keep_N.unsqueeze(1), False)
    return logits_NV.masked_fill(truncated_NV, float("-inf"))


def _truncated(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    truncated_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    if sampling.min_p > 0:
        probs_NV = logits_NV.softmax(-1)
        truncated_NV |= probs_NV < sampling.min_p * probs_NV.amax(-1, keepdim=True)
    left_NV = logits_NV.masked_fill(truncated_NV, float("-inf"))
    if 0 < sampling.top_k < logits_NV.shape[1]:
        kth_N1 = left_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        left_NV = left_NV.masked_fill(left_NV < kth_N1, float("-inf"))
    if sampling.top_p < 1:
        sorted_NV, order_NV = left_NV.sort(dim=-1, descending=True)
        before_NV = sorted_NV.softmax(-1).cumsum(-1) - sorted_NV.softmax(-1)
        beyond_NV = before_NV >= sampling.top_p
        beyond_NV[:, 0] = False
        left_NV = left_NV.masked_fill(beyond_NV.scatter(1, order_NV, beyond_NV), float("-inf"))
    return left_NV.isinf()


def draw(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution at uniform_N (float64) in [0, 1).

    With one uniform number for each token, a row depends on its own seed alone, not on its batch. The inversion first
    finds a BLOCK of tokens, then the token in it, so that float64 sums cover only blocks and one block of each row.
    """
    padding = -probs_NV.shape[1] % BLOCK
    probs_NKS = torch.nn.functional.pad(probs_NV, (0, padding)).unflatten(1, (-1, BLOCK))
    block_N1, within_N1 = _invert(probs_NKS.sum(-1), uniform_N.unsqueeze(1))
    probs_NS = probs_NKS.take_along_dim(block_N1.unsqueeze(2), 1).squeeze(1)
    place_N1, _ = _invert(probs_NS, within_N1)
    token_N = (block_N1 * BLOCK + place_N1).squeeze(1)
    # NaN probabilities could give an index out of range; the update reports NaN weights
    return token_N.clamp(max=probs_NV.shape[1] - 1)


def _invert(mass_NK: Tensor, uniform_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The position where the cumulative sum passes a share of the total, and the fraction within it, in [0, 1)."""
    cdf_NK = mass_NK.cumsum(-1, dtype=torch.float64)
    target_N1 = uniform_N1 * cdf_NK[:, -1:]
    place_N1 = torch.searchsorted(cdf_NK, target_N1, right=True).clamp(max=mass_NK.shape[1] - 1)
    mass_N1 = mass_NK.gather(1, place_N1).double()
    within_N1 = 1 - (cdf_NK.gather(1, place_N1) - target_N1) / mass_N1
    return place_N1, within_N1.clamp(0, BELOW_1)


def apply_repetition_penalty(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty to the logits [N, V] of tokens that the prompt or the completion so far has.

    Above 1 it makes them less likely, below 1 more. Keskar et al. 2019 (CTRL), as in transformers and vLLM: before the
    temperature, a positive logit is divided by the penalty, and a negative one multiplied.
    """
    lower_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, lower_NV, logits_NV)


def first_occurrence(input_ids_BL: Tensor, attention_mask_BL: Tensor, completion: int, vocabulary: int) -> Tensor:
    """Position [B, V] at which each token first occurs in the completion (the row's last `completion` tokens).

    -1 for tokens of the prompt, `completion` for tokens that do not occur; padding does not count. So at position t of
    the completion the seen tokens are those with `first < t`.
    """
    length = input_ids_BL.shape[1]
    place_L = torch.arange(completion - length, completion, device=input_ids_BL.device, dtype=torch.int32).clamp(min=-1)
    place_BL = torch.where(attention_mask_BL.bool(), place_L, completion)
    first_BV = place_BL.new_full((len(input_ids_BL), vocabulary), completion)
    return first_BV.scatter_reduce_(1, input_ids_BL, place_BL, "amin")


SINGLE_THREAD_LIMIT = 10_000_000
"""Multiplications per layer for one token of every row, below which two threads cost more than the work."""


@contextmanager
def single_thread_if_small(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """Use one CPU thread in the block if a decoding step of `rows` completions is small.

    The rule uses size, not timing, so a resumed run samples the same tokens.
    """
    before = torch.get_num_threads()
    total = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())  # ZeRO-3's parameters are empty
    per_layer = total // (getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1)
    small = model.device.type == "cpu" and rows * per_layer <= SINGLE_THREAD_LIMIT
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def derive_seed(*parts: int) -> int:
    """Derive a seed from the run's seed and counters, so no RNG state has to be saved."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion, see `end_token_ids`."""
    return sorted(end_token_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer))


def keep_stop_token_ids(model: Any, tokenizer: Any) -> None:
    """Write the tokens that end a completion into the generation config, so that the saved model ends there too."""
    ids = stop_token_ids(model, tokenizer)
    configured = model.generation_config.eos_token_id
    if set(ids) != set(configured if isinstance(configured, list) else [configured]):
        model.generation_config.eos_token_id = ids
