"""Rows in the layouts of other trainers: values within objects, contents in parts, conversations as text."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Jsonl
from grpocli.tasks.prompts import text_of

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
VERL = {
    "data_source": "add",
    "prompt": CHAT,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
GYM = {"responses_create_params": {"input": CHAT}, "verifier": {"expected": "2"}}


def task_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> Jsonl:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Jsonl(path=str(path), **options)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        (VERL, "prompt", "reward_model.ground_truth"),
        (GYM, "responses_create_params.input", "verifier.expected"),
        ({"prompt": CHAT, "a.b": "2"}, "prompt", "a.b"),
    ],
)
def test_columns_within_objects(tmp_path: Path, row: Any, prompt: str, answer: str, streaming: bool) -> None:
    other = json.loads(json.dumps(row).replace("1+1=", "2+0="))
    options = {"prompt_column": prompt, "answer_column": answer, "streaming": streaming, "eval_size": 1}
    task = task_of(tmp_path, [row, other], **options)
    (example,) = [one for split in ("train", "eval") for one in task.examples(split) if one["prompt"] == CHAT]
    assert (example["prompt"], example["answer"], example[answer]) == (CHAT, "2", "2")


def test_values_within_objects_fill_templates_and_are_columns_of_rewards(tmp_path: Path) -> None:
    template = "{extra_info.index}: {data_source}"
    task = task_of(tmp_path, [VERL] * 4, prompt_template=template, answer_column=None)
    example = task.examples("train")[0]
    assert (example["prompt"], example["reward_model.ground_truth"]) == ("7: add", "2")


@pytest.mark.parametrize("first", [{**VERL, "reward_model": None}, {**VERL, "reward_model": {"ground_truth": None}}])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_row_may_lack_a_value_within_an_object(tmp_path: Path, first: Any, streaming: bool) -> None:
    other = {**VERL, "prompt": [*CHAT, {"role": "user", "content": "2+2="}]}
    task = task_of(
        tmp_path,
        [first, *[other] * 3],
        prompt_template="{reward_model.ground_truth}",
        answer_column=None,
        eval_size=1,
        streaming=streaming,
    )
    with pytest.raises(ConfigError, match="row 1 ") as refused:
        [list(task.examples(split)) for split in ("train", "eval")]
    assert refused.value.key == "task"


def test_a_name_within_an_object_that_is_missing_is_refused(tmp_path: Path) -> None:
    task = task_of(tmp_path, [VERL] * 4, answer_column="reward_model.ground_trth")
    with pytest.raises(ConfigError, match="did you mean") as refused:
        task.examples("train")
    assert refused.value.key == "task.answer_column"


PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]


@pytest.mark.parametrize("form", ["auto", "plain"])
def test_contents_in_parts_are_text(tmp_path: Path, form: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": PARTS}], "answer": "2"}] * 4
    prompt = task_of(tmp_path, rows, format=form).examples("train")[0]["prompt"]
    assert prompt == ("1+1=" if form == "plain" else [{"role": "user", "content": "1+1="}])
    assert text_of({"prompt": [{"role": "user", "content": PARTS}]}, "x") == [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize("form", ["auto", "plain"])
def test_a_part_that_is_no_text_is_refused(tmp_path: Path, form: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    task = task_of(
        tmp_path, [{"prompt": [{"role": "user", "content": [*PARTS, image]}], "answer": "2"}] * 4, format=form
    )
    with pytest.raises(ConfigError, match="image_url"):
        text_of(task.examples("train")[0], "x")


def csv_of(tmp_path: Path, prompt: str) -> Jsonl:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], *([prompt, f"{i}"] for i in range(4))])
    return Jsonl(path=str(path))


@pytest.mark.parametrize("message", [{"role": "user", "content": " "}, {"role": "user", "content": []}])
def test_an_empty_message_of_the_user_is_refused(message: Any) -> None:
    with pytest.raises(ConfigError, match="row 1 ") as refused:
        text_of({"prompt": [CHAT[0], message]}, "row 1")
    assert refused.value.key == "task"


def test_arguments_of_calls_are_objects_also_where_the_data_has_json() -> None:
    def turn(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    (read,) = text_of({"prompt": [turn('{"x": 1}')]}, "row 1")
    assert read == {**turn({"x": 1}), "content": ""}


NUMPY = str(CHAT).replace("}, {", "}\n {")


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(CHAT),
        json.dumps(CHAT, indent=1),
        repr(CHAT),
        f" {CHAT}\n",
        NUMPY,
        f"array({CHAT}, dtype=object)",
        json.dumps({"messages": CHAT}),
        repr({"id": 3, "conversations": CHAT}),
        f"{{'prompt': array({NUMPY},\n      dtype=object)}}",
    ],
)
def test_a_conversation_written_as_text_is_read(tmp_path: Path, written: str) -> None:
    assert csv_of(tmp_path, written).examples("train")[0]["prompt"] == CHAT
    assert text_of({"prompt": written}, "x") == CHAT


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(CHAT)[:-5],
        f"{json.dumps(CHAT)} Go on.",
        "\n".join(map(json.dumps, CHAT)),
        str({"messages": CHAT})[:-1],
    ],
)
def test_one_that_cannot_be_read_is_refused(tmp_path: Path, written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        csv_of(tmp_path, written).examples("train")[0]
    assert refused.value.key == "task.prompt_column"


@pytest.mark.parametrize("write", [lambda one: one, json.dumps, repr], ids=["object", "json", "python"])
@pytest.mark.parametrize("held", [CHAT[1], {"messages": [CHAT[1]]}, {"from": "human", "value": "1+1="}])
def test_messages_within_an_object_and_one_message(tmp_path: Path, held: Any, write: Any) -> None:
    task = task_of(tmp_path, [{"prompt": write(held), "answer": "2"}] * 4)
    assert task.examples("train")[0]["prompt"] == [CHAT[1]]


@pytest.mark.parametrize(
    "written",
    [
        "<|im_start|>user\n1+1=<|im_end|>\n",
        "<s>[INST] 1+1= [/INST]",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1=",
        " <bos><start_of_turn>user\n1+1=",
        "<｜begin▁of▁sentence｜><｜User｜>1+1=",
        "<|user|>\n1+1=",
    ],
)
def test_what_a_chat_template_wrote_is_a_prompt_only_where_plain_is_chosen(tmp_path: Path, written: str) -> None:
    rows = [{"prompt": written, "answer": "2"}] * 4
    for form in ("auto", "chat"):
        with pytest.raises(ConfigError, match="row 1 ") as refused:
            task_of(tmp_path, rows, format=form).examples("train")[0]
        assert refused.value.key == "task.format"
    assert task_of(tmp_path, rows, format="plain").examples("train")[0]["prompt"] == written
    assert task_of(tmp_path, rows, prompt_template="{prompt}").examples("train")[0]["prompt"] == written


@pytest.mark.parametrize(
    "written",
    [
        "[{1, 2}]",
        '[{"name": "x", "content": "y"}]',
        "[1, 2",
        '{"role": "user"}',
        '{"role": "admin", "value": 1} as YAML',
        "What is [INST]?",
    ],
)
def test_other_texts_stay_texts(tmp_path: Path, written: str) -> None:
    assert csv_of(tmp_path, written).examples("train")[0]["prompt"] == written


@pytest.mark.parametrize("names", [("from", "value"), ("role", "content"), ("role", "value")])
@pytest.mark.parametrize("written", [False, True], ids=["list", "text"])
def test_conversations_of_sharegpt(tmp_path: Path, written: bool, names: tuple[str, str]) -> None:
    said = [("system", "Add."), ("human", "1+1="), ("gpt", "2")]
    turns = [dict(zip(names, one, strict=True)) for one in said]
    row = {"conversations": json.dumps(turns) if written else turns}
    task = task_of(tmp_path, [row] * 2, prompt_column="conversations", answer_column=None)
    assert text_of(task.examples("train")[0], "row 1") == [*CHAT, {"role": "assistant", "content": "2"}]
