"""task=jsonl: columns of local files are mapped; bad files are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Gsm8k, Jsonl

ROWS = [{"question": f"{i}+1?", "reply": str(i + 1), "level": i} for i in range(10)]
NAMED = {"prompt_column": "question", "answer_column": "reply"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "data.jsonl", ROWS)


def test_columns_are_mapped_and_others_are_kept(file: str) -> None:
    task = Jsonl(path=file, **NAMED)
    examples = task.examples("train")
    one = next(e for e in (*examples, *task.examples("eval")) if e["level"] == 3)
    assert one == {"question": "3+1?", "reply": "4", "level": 3, "prompt": "3+1?", "answer": "4"}


def test_held_out_examples_are_not_used_for_training(file: str) -> None:
    task = Jsonl(path=file, eval_size=3, **NAMED)
    train, held_out = ([e["level"] for e in task.examples(split)] for split in ("train", "eval"))
    assert sorted(train + held_out) == list(range(10))
    assert len(held_out) == 2  # at most a fifth
    again = Jsonl(path=file, eval_size=3, **NAMED)
    assert [e["level"] for e in again.examples("eval")] == held_out


def test_held_out_examples_may_come_from_a_separate_file(file: str, tmp_path: Path) -> None:
    other = write(tmp_path / "test.jsonl", ROWS[:2])
    task = Jsonl(path=file, eval_path=other, **NAMED)
    assert (len(task.examples("train")), len(task.examples("eval"))) == (10, 2)


def test_without_a_split_to_train_on_a_file_is_evaluated_whole(file: str) -> None:
    task = Jsonl(path=file, split=None, **NAMED)
    assert len(task.examples("eval")) == len(ROWS)
    with pytest.raises(ConfigError) as refused:
        task.examples("train")
    assert refused.value.key == "task.split"


def test_templates_prefixes_and_formats_shape_the_prompt(file: str) -> None:
    plain = Jsonl(path=file, prompt_template="Q: {question}\nA:", prefix="Example\n", answer_column="reply")
    assert plain.examples("train")[0]["prompt"].startswith("Example\nQ: ")
    chat = Jsonl(path=file, format="chat", system_prompt="Be brief.", **NAMED).examples("train")[0]["prompt"]
    assert [m["role"] for m in chat] == ["system", "user"]


def test_conversations_stay_conversations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write(tmp_path / "c.jsonl", [{"prompt": messages, "answer": "x"}] * 3)
    assert Jsonl(path=path).examples("train")[0]["prompt"] == messages
    assert Jsonl(path=path, format="plain").examples("train")[0]["prompt"] == "hi"


@pytest.mark.parametrize(
    ("name", "text"),
    [("d.csv", "prompt,answer\na,1\nb,2\n"), ("d.json", '[{"prompt":"a","answer":"1"},{"prompt":"b","answer":"2"}]')],
)
def test_other_formats_are_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert len(Jsonl(path=str(tmp_path / name)).examples("train")) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompt_column": "qestion"}, 'task.prompt_column=qestion: .* did you mean "question"'),
        (
            {**NAMED, "answer_column": "gold"},
            "task.answer_column=gold: choose one of the columns of .*: question, reply, level",
        ),
        (
            {"prompt_template": "{quest}", "answer_column": None},
            'prompt_template=quest: .* did you mean "question"',
        ),
        ({**NAMED, "prompt_column": "level"}, "task.prompt_column=level: row 1 .* a prompt is text"),
    ],
)
def test_a_missing_column_names_its_key(options: dict[str, Any], sentence: str, file: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _ = [*Jsonl(path=file, **options).examples("train")]


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    for name, text, sentence in [
        ("empty.jsonl", "", "it is empty"),
        ("one.jsonl", '{"prompt": "a", "answer": "b"}\n', "has one example"),
        ("broken.jsonl", '{"prompt": "a", "answer"', "cannot be read"),
        ("text.txt", "a\n", "needs files of one kind"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=r"task\.path=.*" + sentence):
            Jsonl(path=str(tmp_path / name)).examples("train")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        Jsonl(path=str(tmp_path / "missing.jsonl")).examples("train")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=r"pipe\.jsonl: is neither a file nor a folder"):
        Jsonl(path=str(tmp_path / "pipe.jsonl")).examples("train")


def test_a_name_that_the_hub_lacks_is_refused(cache_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path=nobody/nothing: there is no such local file, and the hub"):
        Jsonl(path="nobody/nothing").examples("train")


def test_gsm8k_is_read_from_local_files(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "2 x 600 = <<2*600=1200>>1200\n#### 1,200"}
    write(tmp_path / "train.jsonl", [row] * 3)
    write(tmp_path / "test.jsonl", [row])
    task = Gsm8k(path=str(tmp_path))
    assert [len(task.examples(s)) for s in ("train", "eval")] == [3, 1]
    one = task.examples("train")[0]
    assert one["answer"] == "1200"
    assert one["solution"].startswith("2 x 600")
    assert one["prompt"][0]["content"].startswith("How many?")
    assert "\\boxed{}" in one["prompt"][0]["content"]


def test_gsm8k_without_a_final_answer_or_a_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": "q", "answer": "none"}] * 2)
    write(tmp_path / "test.jsonl", [{"question": "q", "answer": "#### 1"}])
    with pytest.raises(ConfigError, match="no final #### NUMBER"):
        Gsm8k(path=str(tmp_path)).examples("train")[0]
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has no test\.jsonl"):
        Gsm8k(path=str(tmp_path)).examples("eval")
