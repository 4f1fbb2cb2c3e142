"""Examples become token ids: special tokens once, long prompts dropped or cut, templates that fail refused."""

from __future__ import annotations

from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.prompts import PromptMaker, PromptSet

TEXTS = [{"prompt": "a b c", "answer": "1"}, {"prompt": "c", "answer": "2"}, {"prompt": "b b b b", "answer": "3"}]
CHAT = [{"prompt": [{"role": "user", "content": "a b"}], "answer": "1"}]


def ids(tokenizer: Any, prompt: Any) -> list[int]:
    return PromptSet([{"prompt": prompt}], PromptMaker(tokenizer, 10), "train").prompt(0, "u").token_ids


def post_processed(tokenizer: Any, single: str) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokens = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


def test_a_prompt_begins_with_one_bos_and_does_not_end(plain_tokenizer, chat_tokenizer) -> None:
    assert ids(plain_tokenizer, "<s> a b") == ids(plain_tokenizer, "a b") == [1, 6, 7]
    assert ids(chat_tokenizer, [{"role": "user", "content": "a"}]) == [1, 3, 6, 4]
    assert ids(post_processed(plain_tokenizer, "<s> $A </s>"), "a b") == [1, 6, 7]
    assert ids(plain_tokenizer, "a </s>") == [1, 6, 2]


def test_a_prompt_has_its_text_and_columns(plain_tokenizer) -> None:
    prompt = PromptSet(TEXTS, PromptMaker(plain_tokenizer, 10, task="words"), "train").prompt(0, uid="u")
    assert (prompt.token_ids, prompt.text, prompt.uid, prompt.row) == ([1, 6, 7, 8], "a b c", "u", 0)
    assert prompt.columns == {"answer": "1", "task_name": "words"}


def test_long_prompts_are_dropped_or_cut_and_counted(plain_tokenizer) -> None:
    whole, dropped, cut = (
        PromptSet(TEXTS, PromptMaker(plain_tokenizer, limit, long), "train")
        for limit, long in ((10, "drop"), (4, "drop"), (3, "truncate"))
    )
    assert (len(whole), whole.report) == (3, "")
    assert [dropped.prompt(i, "u").columns["answer"] for i in range(len(dropped))] == ["1", "2"]
    assert dropped.report == "1 of 3 train prompts are longer than rollout.max_prompt_tokens=4 and were dropped"
    assert (len(cut), cut.prompt(0, "u").token_ids) == (3, [6, 7, 8])
    assert "2 of 3 train prompts" in cut.report
    assert "cut on the left" in cut.report
    with pytest.raises(ConfigError, match=r"all 3 train prompts .* shortest has 2") as refused:
        PromptSet(TEXTS, PromptMaker(plain_tokenizer, 1), "train")
    assert refused.value.key == "rollout.max_prompt_tokens"


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
        "{% if messages[0].content == 'c' %}{{ raise_exception('No.') }}{% endif %}a",
    ],
)
def test_a_template_that_fails_is_reported(chat_tokenizer, template: str) -> None:
    chat_tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=r"train example [01]") as refused:
        PromptSet([*CHAT, {"prompt": [{"role": "user", "content": "c"}]}], PromptMaker(chat_tokenizer, 10), "train")
    assert refused.value.key == "model"


@pytest.mark.parametrize("prompt", [None, "", [], " "])
def test_prompts_without_tokens_are_refused(prompt: Any, plain_tokenizer) -> None:
    with pytest.raises(ConfigError, match="train example 1") as refused:
        PromptSet([TEXTS[0], {"prompt": prompt}], PromptMaker(post_processed(plain_tokenizer, "$A"), 10), "train")
    assert refused.value.key == "task"
