"""Parts of sampling: seeds, end tokens, stop strings, the repetition penalty, and threads on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTEXT = 6  # tokens of the prompt that may change how the completion's first ones are decoded
UNFINISHED = "\ufffd"  # what the first bytes of a character are decoded to


class StopStrings:
    """Watches the growing text of one completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self.tokenizer, self.stop = tokenizer, list(stop)
        self._ids = list(prompt_ids[-CONTEXT:])
        self._said = self._decode()  # what is already part of the text, of the tokens kept for context
        self._new = len(self._ids)  # where the tokens begin that have not become text
        self._tail = ""
        self._reach = (
            max(map(len, stop), default=1) - 1
        )  # characters before the new ones that a stop string may begin with

    def completed_by(self, token: int) -> bool:
        """Add the next token; whether its text completes a stop string."""
        self._ids.append(token)
        text = self._decode()
        if len(text) <= len(self._said) or text.endswith(UNFINISHED):
            return False
        grown = self._tail + text[len(self._said) :]
        self._ids, self._new = self._ids[self._new :], len(self._ids) - self._new
        self._said = self._decode()
        self._tail = grown[-self._reach :] if self._reach else ""
        return any(stop in grown for stop in self.stop)

    def _decode(self) -> str:
        text: str = self.tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )  # as vLLM does
        return text


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


SMALL = 10_000_000
"""Multiplications of a layer for one token of every row; below that, threads wait for each other longer than they work.

Measured with two threads; with more there is more to wait for.
"""


@contextmanager
def threads_for(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """While `rows` completions are sampled side by side."""
    before = torch.get_num_threads()
    if model.device.type != "cpu" or before == 1 or rows * _layer(model) > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _layer(model: PreTrainedModel) -> int:
    """Parameters, the model's by its layers. DeepSpeed's are empty while they are elsewhere, and know their size."""
    total = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return int(total // (getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1))


def seed_of(*parts: int) -> int:
    """A seed for one prompt's completions from the run's seed and counters: nothing else to save or restore."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: those of the model's generation config, and the tokenizer's own."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)
