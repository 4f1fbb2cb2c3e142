"""Rows become prompts by template, prefix, system prompt and format; unusable rows are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.dataset import PromptBuilder
from grpocli.tasks.jsonl import Hub, Jsonl


def mapping(**options: Any) -> PromptBuilder:
    return PromptBuilder(Jsonl(path="a.jsonl", **options))


USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "old"}


@pytest.mark.parametrize(
    ("options", "prompt", "wanted"),
    [
        ({}, "hi", "hi"),
        ({}, [USER], [USER]),
        ({"format": "chat"}, "hi", [USER]),
        ({"format": "plain"}, [SYSTEM, USER], "old\nhi"),
        ({"system_prompt": "new"}, "hi", [{"role": "system", "content": "new"}, USER]),
        ({"system_prompt": "new"}, [SYSTEM, USER], [{"role": "system", "content": "new"}, USER]),
        ({"prefix": "1+1=2\n"}, "hi", "1+1=2\nhi"),
        ({"prompt_template": "{{{prompt}}}: {n:02d}"}, "hi", "{hi}: 07"),
    ],
)
def test_a_row_becomes_a_prompt(options: dict[str, Any], prompt: Any, wanted: Any) -> None:
    assert mapping(**options).prompt({"prompt": prompt, "n": 7}, "row 0") == wanted


def test_keys_without_a_value_are_removed_from_messages() -> None:
    assert mapping().prompt({"prompt": [{**USER, "tool_calls": None}]}, "row 0") == [USER]


@pytest.mark.parametrize(
    ("options", "prompt", "sentence"),
    [
        ({}, None, "row 3 has nothing in the column 'prompt'"),
        ({}, " ", "row 3 has ' ' there"),
        ({}, 5, "row 3 has 5 there"),
        ({}, [], "row 3 has [] there"),
        ({}, ["hi"], "row 3 has ['hi'] there"),
        ({"prompt_template": "Q: {prompt}"}, None, "row 3 has nothing in the column 'prompt'"),
        ({"prompt_template": "Q: {prompt}"}, float("nan"), "row 3 has nan in the column 'prompt'"),
        ({"prompt_template": "{prompt:.2f}"}, "hi", "cannot be filled with row 3"),
        ({"prefix": "x"}, [USER], "task.prefix='x': row 3 is a list of messages"),
    ],
)
def test_an_unusable_prompt_names_its_row(options: dict[str, Any], prompt: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        mapping(**options).prompt({"prompt": prompt}, "row 3")
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{quest}", "task.prompt_template=quest: choose one"),
        ("{}", "task.prompt_template=: choose one"),
        ("{question", "double the braces"),
        ("}", "double the braces"),
    ],
)
def test_a_template_that_cannot_be_filled_names_the_row(template: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        mapping(prompt_template=template).check(["question"], "data.jsonl")
    assert str(error.value).startswith("task.prompt_template=")


@pytest.mark.parametrize("options", [{"eval_split": "train"}, {"eval_split": "test"}, {"same": True}])
def test_training_examples_are_refused_for_evaluation(options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    task = Jsonl(path=str(file), eval_path=str(file)) if options.pop("same", 0) else Jsonl(path=str(file), **options)
    with pytest.raises(ConfigError, match="would give the examples to train on"):
        task.examples("eval")


def test_answer_column_may_be_null_or_another_name(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "gold": i}) + "\n" for i in range(3)))
    assert "answer" not in Hub(path=str(file), answer_column=None).examples("train")[0]
    assert {e["answer"] - e["gold"] for e in Hub(path=str(file), answer_column="gold").examples("train")} == {0}


def test_indexing_and_iterating_agree(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": i}) + "\n" for i in range(10)))
    examples = Jsonl(path=str(file)).examples("train")
    assert list(examples) == [examples[i] for i in range(len(examples))] == examples[:]
    with pytest.raises(IndexError):
        examples[len(examples)]


@pytest.mark.parametrize(
    ("row", "there"),
    [
        ({"prompt": "p"}, "nothing"),
        ({"prompt": "p", "answer": None}, "nothing"),
        ({"prompt": "p", "answer": math.nan}, "nan"),
        ({"prompt": "p", "answer": [1, {"x": -math.inf}]}, "-inf"),
    ],
)
def test_rows_without_an_answer_are_refused(row: dict[str, Any], there: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": 0}\n{"prompt": "b", "answer": 0}\n' + json.dumps(row))
    with pytest.raises(
        ConfigError, match=rf"task\.answer_column=answer: row 3 of .*a\.jsonl has {there} there; fill it"
    ):
        _ = [*Hub(path=str(file)).examples("train"), *Hub(path=str(file)).examples("eval")]
    assert len(Hub(path=str(file), answer_column=None).examples("train")[:]) == 2
