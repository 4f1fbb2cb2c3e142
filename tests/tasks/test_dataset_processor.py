"""task.processor: a user function converts rows to examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Jsonl
from grpocli.tasks.prompt_set import PromptSet

CODE = """
import re

def process(row):
    if row["id"] == 7:
        raise KeyError("question")
    if row["id"] == 8:
        return {"answer": 1}
    if row["id"] == 9:
        raise SystemExit("enough")
    if row["id"] == 10:
        re.match("(a+)+$", "a" * 60 + "b")
    return {
        "prompt": [{"role": "user", "content": "a " * row["id"]}], "answer": row["id"],
        "loss_multiplier": row.get("multiplier") or 1.0,
    }
"""


@pytest.fixture
def task(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(CODE)

    def make(*rows: dict[str, Any], **settings: Any) -> Jsonl:
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Jsonl(path=str(tmp_path / "d.jsonl"), processor=f"{tmp_path}/mine.py:process", **settings)

    return make


def test_the_processor_returns_the_examples(task) -> None:
    made = task(*({"id": n} for n in range(1, 6)))
    train, held_out = made.examples("train"), made.examples("eval")
    assert sorted(one["answer"] for one in [*train, *held_out]) == [1, 2, 3, 4, 5]
    assert all(one["prompt"][0]["content"] == "a " * one["answer"] for one in train)
    assert len(held_out) == 1


def test_loss_multiplier_reaches_the_prompt(task, chat_tokenizer) -> None:
    made = task({"id": 1, "multiplier": 0.5}, {"id": 2}, {"id": 3})
    prompts = PromptSet(made.examples("train"), chat_tokenizer, 99, "drop", "train")
    found = {
        prompts.prompt(i, "").columns["answer"]: prompts.prompt(i, "").loss_multiplier for i in range(len(prompts))
    }
    assert found == {answer: 0.5 if answer == 1 else 1.0 for answer in found}
    for bad in (-1, "much"):
        made = task({"id": 1, "multiplier": bad}, {"id": 2, "multiplier": bad})
        with pytest.raises(ConfigError, match=f"train example 0 .*has the loss_multiplier {bad!r}; it must"):
            PromptSet(made.examples("train"), chat_tokenizer, 99, "drop", "train")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (7, "raised KeyError for row [12] of .*'question'"),
        (8, "made {'answer': 1} of row [12]"),
        (9, "raised SystemExit for row [12]"),
        (10, r"raised TimeoutError for row [12] of .*: no example within 0\.5 s \(task\.processor_timeout\)"),
    ],
)
def test_a_failing_processor_gives_a_one_sentence_error(task, row: int, said: str) -> None:
    made = task({"id": row}, {"id": row}, processor_timeout=0.5)
    with pytest.raises(ConfigError, match=rf"task\.processor=.*mine\.py:process: {said}"):
        list(made.examples("train"))


def test_a_processor_is_found_by_a_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ourdata" / "math"
    package.mkdir(parents=True)
    (package / "convert.py").write_text("def process(row):\n    return {'prompt': f'{row[\"q\"]}='}\n")
    (tmp_path / "d.jsonl").write_text('{"q": "1+1"}\n{"q": "2+2"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Jsonl(path=str(tmp_path / "d.jsonl"), processor="ourdata.math.convert.process")
    made.check_ready()
    assert sorted(one["prompt"] for split in ("train", "eval") for one in made.examples(split)) == ["1+1=", "2+2="]
    with pytest.raises(ConfigError, match=r"has no function or class absent"):
        Jsonl(path=str(tmp_path / "d.jsonl"), processor="ourdata.math.convert.absent").examples("train")


def test_a_missing_function_is_refused(task, tmp_path: Path) -> None:
    task({"id": 1}, {"id": 2})
    with pytest.raises(ConfigError, match=r'mine\.py has no function or class proces; did you mean "process"'):
        Jsonl(path=str(tmp_path / "d.jsonl"), processor=f"{tmp_path}/mine.py:proces").examples("train")
    with pytest.raises(ConfigError, match=r"task\.processor=mine: must be FILE\.py:NAME"):
        Jsonl(path="d.jsonl", processor="mine")
