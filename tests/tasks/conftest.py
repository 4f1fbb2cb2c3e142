"""Word-level tokenizers, with and without a chat template, and samples for rewards."""

from __future__ import annotations

import pytest
from rewards.conftest import sample

__all__ = ["sample"]


def words(chat_template: str | None):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "USER", "ASSISTANT", "SYSTEM", "a", "b", "c"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = chat_template
    return made


@pytest.fixture
def plain_tokenizer():
    return words(None)


@pytest.fixture
def chat_tokenizer():
    return words(
        "<s>{% for m in messages %} {{ m.role | upper }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} ASSISTANT{% endif %}"
    )
