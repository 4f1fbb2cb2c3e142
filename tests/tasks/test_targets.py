"""Targets of supervised training: exactly the tokens that follow the tokenised prompt, and their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environments.tool_families import FAMILIES
from jsonl import write

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.tasks.prompt_source import PromptSource
from grpocli.tasks.prompts import PromptMaker, PromptSet, Targets, tokenize
from grpocli.tasks.table import Jsonl

TINY = make_tokenizer()
NONE: frozenset[int] = frozenset()
QUESTION = [{"role": "user", "content": "1+1="}]


def made(tokenizer: Any, prompt: Any, target: Any, **options: Any) -> list[int]:
    (ids,) = Targets(tokenizer, 99, **{"end_ids": NONE, **options}).token_ids([prompt], [target])
    return ids


def test_a_target_is_what_the_chat_template_writes_after_the_generation_prompt() -> None:
    ids = made(TINY, QUESTION, "two")
    assert TINY.decode(tokenize([QUESTION], TINY)[0] + ids) == "<bos><user>1+1=<end><assistant>two<end>"
    assert TINY.decode(ids) == "two<end>"


def test_text_after_the_end_of_the_turn_is_not_taught() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TINY.chat_template.replace("'<end>' }}", "'<end>\n' }}")
    assert tokenizer.decode(made(tokenizer, QUESTION, "two")) == "two<end>"


def test_the_end_of_a_turn_is_a_token_of_the_generation_config_too(chat_tokenizer) -> None:
    c = chat_tokenizer.convert_tokens_to_ids("c")
    prompt = [{"role": "user", "content": "a"}]
    assert made(chat_tokenizer, prompt, "b c a", end_ids=frozenset([c])) == chat_tokenizer.convert_tokens_to_ids(
        ["b", "c"]
    )
    assert made(chat_tokenizer, prompt, "b")[-1] == chat_tokenizer.eos_token_id, "the template writes no end"


def test_a_plain_target_continues_the_prompt_and_ends(plain_tokenizer) -> None:
    assert made(plain_tokenizer, "a b", " c") == [*plain_tokenizer.convert_tokens_to_ids(["c"]), 2]


def test_a_template_that_writes_answers_elsewhere_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + TINY.chat_template
    with pytest.raises(ConfigError, match="another way when an answer follows"):
        made(tokenizer, QUESTION, "two")


def test_the_last_turn_of_a_conversation_is_its_target() -> None:
    example = {"prompt": [*QUESTION, {"role": "assistant", "content": "two"}], "x": 1}
    targets = Targets(TINY, 99, NONE)
    assert targets.split(example, "row 1") == ({"prompt": QUESTION, "x": 1}, example["prompt"][-1])
    assert Targets(TINY, 99, NONE, template="{x}").split(example, "row 1") == ({"prompt": QUESTION, "x": 1}, "1")
    with pytest.raises(ConfigError, match="has only an answer"):
        targets.split({"prompt": example["prompt"][1:]}, "row 1")


CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}


def taught(tokenizer: Any, **answer: Any) -> str:
    example = {"prompt": [*QUESTION, {"role": "assistant", **answer}]}
    targets = Targets(tokenizer, 999, NONE)
    bare, target = targets.split(example, "row 1")
    return str(tokenizer.decode(targets.token_ids([bare["prompt"]], [target], "row {}".format)[0]))


@pytest.mark.parametrize("content", ["Let me compute.", ""])
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_calls_of_an_answer_are_taught_as_the_template_writes_them(name: str, content: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    turn = {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}
    whole = tokenizer.apply_chat_template([*QUESTION, turn], tokenize=False)
    function = CALL["function"] | {"arguments": json.dumps(CALL["function"]["arguments"])}  # type: ignore[operator]
    for call in (CALL, CALL | {"function": function}):
        empty = {"reasoning_content": None, "name": None}
        found = taught(tokenizer, content=content, tool_calls=[call, CALL], **empty)
        assert found == whole.removeprefix(prompt).rstrip("\n")
        assert found.count("multiply") == 2


def sft_data(path: Path, chats: list[Any], *keys: str) -> PromptSource:
    write(path, [{"messages": chat} for chat in chats])
    chosen = ["algorithm=sft", "task=jsonl", f"task.path={path}", "task.prompt_column=messages", "reward=none"]
    sizes = ["task.eval_size=4", "eval.problems=4", "rollout.max_prompt_tokens=64", "rollout.max_completion_tokens=64"]
    return PromptSource.of(build_run(compose([*chosen, *sizes, "task.answer_column=null", *keys])), TINY)


def test_prompts_show_the_tools_whose_calls_are_taught(tmp_path: Path) -> None:
    call = {"function": {"name": "calculator", "arguments": '{"expression": "3*4"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    chats = [[{"role": "user", "content": f"{i}"}, answer] for i in range(20)]
    data = sft_data(tmp_path / "calls.jsonl", chats, "task.tools=[calculator]")
    for prompt in (data.draw(0), data.problems()[0]):
        assert prompt.target_ids is not None
        shown = f"<bos><system>calculator(expression)<end><user>{prompt.text[-1]['content']}<end><assistant>"
        assert TINY.decode(prompt.token_ids) == shown
        assert TINY.decode(prompt.target_ids) == "calculator(expression=3*4)<end>"


def test_conversations_with_answers_are_data(tmp_path: Path) -> None:
    """The usual form of chat data; the held-out conversations are not trained on, and their answers are targets."""
    chats = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i * i}"}] for i in range(20)]
    data = sft_data(tmp_path / "chats.jsonl", chats)
    drawn = [data.draw(i) for i in range(16)]
    for prompt in [*drawn, *data.problems()]:
        assert len(prompt.text) == 1
        assert TINY.decode(prompt.target_ids) == f"{int(prompt.text[0]['content']) ** 2}<end>"
    numbers = {prompt.text[0]["content"] for prompt in drawn}
    assert len(numbers) == 16
    assert not numbers & {prompt.text[0]["content"] for prompt in data.problems()}


def test_thoughts_of_an_answer_are_taught() -> None:
    tokenizer = make_tokenizer()
    thought = "{% if message.reasoning_content %}{{ '[' + message.reasoning_content + ']' }}{% endif %}"
    tokenizer.chat_template = TINY.chat_template.replace("{% for call", thought + "{% for call")
    assert taught(tokenizer, content="two", reasoning_content="1+1") == "two[1+1]<end>"
    assert taught(tokenizer, content="two", reasoning_content=None, tool_calls=[]) == "two<end>"


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        ({"content": "a", "reasoning_content": "b"}, "model"),  # Llama's template does not write it
        ({"content": "a", "tool_calls": [CALL]}, "model"),  # it writes a call alone
        ({"content": "", "tool_calls": []}, "task.target_template"),
        ({"content": None}, "task"),
        ({"content": "", "tool_calls": [{"name": "multiply"}]}, "task"),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}, "task"),
    ],
)
def test_an_answer_that_cannot_be_taught_whole_is_refused(answer: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=r"row [01]") as refused:
        taught(FAMILIES["llama"].tokenizer(), **answer)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("example", "template"),
    [
        ({"prompt": "a", "answer": None}, None),
        ({"prompt": "a", "answre": "1"}, "{answer}"),
        ({"prompt": "a", "answer": " "}, None),
        ({"prompt": "a", "answer": "\ud800"}, None),
        ({"prompt": "a", "answer": "b"}, "{answer:d}"),
    ],
)
def test_a_bad_target_is_refused(example: dict[str, Any], template: str | None) -> None:
    with pytest.raises(ConfigError, match="row 1") as refused:
        Targets(TINY, 99, NONE, template).split(example, "row 1")
    assert refused.value.key == "task.target_template"


def test_long_targets_are_dropped_or_cut_and_counted() -> None:
    examples = [{"prompt": "1", "answer": "22"}, {"prompt": "1", "answer": "4444"}]
    targets = Targets(TINY, 3, NONE)
    prompts = PromptSet(examples, PromptMaker(TINY, 10, targets=targets), "train")
    assert len(prompts) == 1
    assert "1 of 2 train targets are longer than rollout.max_completion_tokens=3 and were dropped" in prompts.report
    cut = PromptSet(examples, PromptMaker(TINY, 10, "truncate", targets=targets), "train")
    assert TINY.decode(cut.prompt(1, "u").target_ids) == "444", "without an end, which would be false"
    assert "cut at the end" in cut.report
    with pytest.raises(ConfigError, match="all 2 train targets are longer, the shortest has 3 tokens"):
        PromptSet(examples, PromptMaker(TINY, 10, targets=Targets(TINY, 2, NONE)), "train")


def test_a_question_with_several_answers_is_on_one_side(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"{i % 10}"}, {"role": "assistant", "content": f"{i}"}] for i in range(40)]
    path = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    made = Jsonl(path=path, prompt_column="messages", answer_column=None)
    sides = [{one["prompt"][0]["content"] for one in made.examples(split)} for split in ("train", "eval")]
    assert sides[0] | sides[1] == {f"{i}" for i in range(10)}
    assert not sides[0] & sides[1]
