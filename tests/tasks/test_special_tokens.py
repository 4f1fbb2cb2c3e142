"""A plain prompt starts with one BOS and ends without EOS, for every tokenizer."""

from __future__ import annotations

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.prompt_set import PromptSet


def ids(tokenizer, prompt) -> list[int]:
    return PromptSet([{"prompt": prompt}], tokenizer, 10, "drop", "train").prompt(0, "u").token_ids


def test_a_bos_in_the_text_is_not_doubled(plain_tokenizer) -> None:
    assert ids(plain_tokenizer, "<s> a b") == ids(plain_tokenizer, "a b") == [1, 6, 7]


def test_an_eos_that_the_tokenizer_adds_is_removed(plain_tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    plain_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert ids(plain_tokenizer, "a b") == [1, 6, 7]
    assert ids(plain_tokenizer, "a </s>") == [1, 6, 2]


def test_chat_prompts_have_only_the_bos_of_the_template(chat_tokenizer) -> None:
    assert ids(chat_tokenizer, [{"role": "user", "content": "a"}]) == [1, 3, 6, 4]


def test_a_prompt_without_tokens_is_refused(plain_tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    plain_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ConfigError, match="has no tokens"):
        ids(plain_tokenizer, " ")


def test_a_template_that_refuses_a_role_is_reported(chat_tokenizer) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigError, match="chat template refuses train example 0: no system role"):
        ids(chat_tokenizer, [{"role": "system", "content": "a"}])
