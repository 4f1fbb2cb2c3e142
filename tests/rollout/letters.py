"""A byte-level tokenizer of letters and pairs of letters, small enough for a tiny model, that does not round-trip."""

from __future__ import annotations

from itertools import product
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPACE, NEWLINE, FIRST_BYTE, SECOND_BYTE = "Ġ", "Ċ", "Ã", "©"  # the last two are the bytes of é
SINGLE = [*"abcdefghijklmnop", *"0123456789", *'{}[]":,.-+', SPACE, NEWLINE, FIRST_BYTE, SECOND_BYTE]


def letters(vocabulary: int) -> PreTrainedTokenizerFast:
    """Special tokens 0 and 1, then single characters, then pairs, `vocabulary` in all.

    "ab" can be one token or two; the encoder uses one.
    """
    pairs = [a + b for a, b in product("abcdefgh", repeat=2)]
    words = ["<s>", "</s>", *SINGLE, *pairs][:vocabulary]
    merges = [(word[0], word[1]) for word in words if word in pairs]
    core = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    assert len(made) == vocabulary
    return made


def cut(tokenizer: Any, token_ids: list[int], stop: tuple[str, ...]) -> list[int]:
    """The tokens up to the first whose text completes a stop string, or all tokens."""
    for n in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:n], skip_special_tokens=True)
        if any(s in text for s in stop):
            return token_ids[:n]
    return token_ids
