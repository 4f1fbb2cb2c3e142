"""GSM8K's format, from a folder and from a single file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Gsm8k


def write(path: Path, answers: list[str]) -> Path:
    rows = [{"question": f"Question {i}?", "answer": a} for i, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_single_file_is_split_without_overlap(tmp_path: Path) -> None:
    task = Gsm8k(path=str(write(tmp_path / "train.jsonl", [f"so\n#### {i}" for i in range(10)])))
    train, held_out = ({e["question"] for e in task.examples(s)} for s in ("train", "eval"))
    assert (len(train), len(held_out)) == (8, 2)
    assert not train & held_out


@pytest.mark.parametrize(("written", "answer"), [("#### 1,234,567", "1234567"), ("a #### b\n#### -3.5 ", "-3.5")])
def test_the_answer_follows_the_last_hash_mark(written: str, answer: str, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [written])
    write(tmp_path / "test.jsonl", ["#### 1"])
    assert Gsm8k(path=str(tmp_path)).examples("train")[0]["answer"] == answer


def test_template_and_system_prompt_can_be_set(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ["#### 1"])
    task = Gsm8k(path=str(tmp_path), prompt_template="Q: {question}", system_prompt="Be brief.")
    assert task.examples("train")[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: Question 0?"},
    ]
    plain = Gsm8k(path=str(tmp_path), prompt_template="Q: {question}\nA:", format="plain")
    assert plain.examples("train")[0]["prompt"] == "Q: Question 0?\nA:"


def test_an_answer_without_a_number_names_its_row(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ["#### 1", "#### "])
    with pytest.raises(ConfigError, match=r"row 2 of .* has no final #### NUMBER"):
        Gsm8k(path=str(tmp_path)).examples("train")[1]
