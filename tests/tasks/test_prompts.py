"""Examples become token ids; long prompts are dropped or truncated."""

from __future__ import annotations

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.curriculum import Order
from grpocli.tasks.prompt_set import PromptSet

TEXTS = [{"prompt": "a b c", "answer": "1"}, {"prompt": "c", "answer": "2"}, {"prompt": "b b b b", "answer": "3"}]
CHAT = [{"prompt": [{"role": "user", "content": "a b"}], "answer": "1"}]


def test_plain_text_gets_the_tokenizers_own_special_tokens(plain_tokenizer) -> None:
    prompts = PromptSet(TEXTS, plain_tokenizer, 10, "drop", "train")
    assert len(prompts) == 3
    first = prompts.prompt(0, uid="u")
    assert first.token_ids == [1, 6, 7, 8]
    assert first.text == "a b c"
    assert first.columns == {"answer": "1"}
    assert first.uid == "u"
    assert prompts.report == ""


def test_conversations_go_through_the_chat_template_without_a_second_bos(chat_tokenizer) -> None:
    prompt = PromptSet(CHAT, chat_tokenizer, 10, "drop", "train").prompt(0, uid="u")
    assert chat_tokenizer.convert_ids_to_tokens(prompt.token_ids)[0:1] != ["<unk>"]
    assert prompt.token_ids.count(1) <= 1
    assert prompt.token_ids[-1] == 4
    assert prompt.text == CHAT[0]["prompt"]


def test_long_prompts_are_dropped_and_counted(plain_tokenizer) -> None:
    prompts = PromptSet(TEXTS, plain_tokenizer, 4, "drop", "train")
    assert (len(prompts), prompts.n_dropped, prompts.n_truncated) == (2, 1, 0)
    assert [prompts.prompt(i, "u").columns["answer"] for i in range(2)] == ["1", "2"]
    assert prompts.report == "1 of 3 train prompts are longer than rollout.max_prompt_tokens=4 and were dropped"


def test_long_prompts_are_cut_on_the_left(plain_tokenizer) -> None:
    prompts = PromptSet(TEXTS, plain_tokenizer, 3, "truncate", "train")
    assert (len(prompts), prompts.n_dropped, prompts.n_truncated) == (3, 0, 2)
    assert prompts.prompt(0, "u").token_ids == [6, 7, 8]
    assert "cut on the left" in prompts.report


def test_only_long_prompts_are_refused(plain_tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_prompt_tokens=1: all 3 train prompts .* shortest has 2"):
        PromptSet(TEXTS, plain_tokenizer, 1, "drop", "train")


def test_conversations_need_a_chat_template(plain_tokenizer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        PromptSet(CHAT, plain_tokenizer, 10, "drop", "train")


@pytest.mark.parametrize(
    "template", ["{% include 'x' %}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}"]
)
def test_a_template_that_fails_is_reported(chat_tokenizer, template: str) -> None:
    chat_tokenizer.chat_template = template
    with pytest.raises(ConfigError) as refused:
        PromptSet(CHAT, chat_tokenizer, 10, "drop", "train")
    assert refused.value.key == "model"


def test_a_template_that_refuses_an_example_is_reported(chat_tokenizer) -> None:
    chat_tokenizer.chat_template = "{% if messages[0].content == 'c' %}{{ raise_exception('No.') }}{% endif %}a"
    bad = {"prompt": [{"role": "user", "content": "c"}]}
    with pytest.raises(ConfigError, match=r"^model: its chat template refuses train example 1: No; change the example"):
        PromptSet([*CHAT, bad], chat_tokenizer, 10, "drop", "train")


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (None, "must be text or messages"),
        ("", "must be text or messages"),
        ([], "must be text or messages"),
        ([{"role": "wizard", "content": "a"}], "needs a `content` and a `role`"),
        ([{"role": "user"}], "needs a `content` and a `role`"),
        ("a\ud800", "has a lone surrogate, half of a character, in its prompt"),
        ([{"role": "user", "content": "\udc00"}], "has a lone surrogate, half of a character, in its prompt"),
    ],
)
def test_unusable_prompts_are_refused(prompt, sentence: str, chat_tokenizer) -> None:
    with pytest.raises(ConfigError, match="train example 1") as error:
        PromptSet([TEXTS[0], {"prompt": prompt}], chat_tokenizer, 10, "drop", "train")
    assert sentence in str(error.value)


def test_every_example_is_drawn_once_per_epoch_in_a_new_order() -> None:
    order = Order(10, seed=3)
    epochs = [[order.index(e * 10 + i) for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Order(10, seed=3).index(d) for d in (25, 3, 12)] == [epochs[2][5], epochs[0][3], epochs[1][2]]
    assert [Order(10, seed=4).index(i) for i in range(10)] != epochs[0]
