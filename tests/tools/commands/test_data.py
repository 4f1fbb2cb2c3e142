"""`grpocli data`: counts, lengths, duplicates and overlap, prompts as the model sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonl import write

QUESTIONS = ["1+1=", "2+2=", "1+1=", "10+20+30=", "3+3="]


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    rows = [{"prompt": q, "answer": "7", "level": i} for i, q in enumerate(QUESTIONS)]
    train = write(tmp_path / "train.jsonl", rows)
    evaluate = write(tmp_path / "eval.jsonl", [{"prompt": q, "answer": "7"} for q in ("3+3=", "4+4=")])
    return ["task=jsonl", f"task.path={train}", f"task.eval_path={evaluate}", "task.format=chat"]


def printed(grpocli, *argv: str) -> str:
    return grpocli("data", *argv, code=0)[1]


def splits(grpocli, *argv: str) -> dict[str, dict[str, Any]]:
    return {one["split"]: one for one in json.loads(printed(grpocli, *argv, "--json"))["splits"]}


def test_the_view_counts_what_a_run_would_drop_repeat_and_evaluate(task, grpocli) -> None:
    """`<bos><user>10+20+30=<end><assistant>` has 13 tokens."""
    found = splits(grpocli, *task, "rollout.max_prompt_tokens=12")
    train = found["train"]
    assert (train["examples"], train["read"]) == (5, 5)
    assert train["too_long"] == [3]
    assert train["duplicates"] == [2]
    assert train["overlap"] == [4]
    assert (train["prompt_tokens"]["min"], train["prompt_tokens"]["max"]) == (8, 13)
    assert train["columns"] == {"answer": "str", "level": "int"}
    assert train["prompts"][0]["text"] == "<bos><user>1+1=<end><assistant>"
    assert len(train["prompts"]) == 3
    assert found["eval"]["overlap"] == []
    shown = printed(grpocli, *task, "rollout.max_prompt_tokens=12")
    assert "1 of 5 over rollout.max_prompt_tokens=12: dropped (example 3)" in shown
    assert "1 of 5 have the prompt of an earlier example (example 2)" in shown
    assert "1 of 5 are evaluation prompts, too (example 4)" in shown
    assert "<bos><user>2+2=<end><assistant>" in shown


def test_one_example_or_the_longest_can_be_shown(task, grpocli) -> None:
    of_both = splits(grpocli, *task, "--example", "4")
    assert {name: [p["example"] for p in one["prompts"]] for name, one in of_both.items()} == {"train": [4], "eval": []}
    longest = splits(grpocli, *task, "--split", "train", "--longest", "--prompts", "1")
    assert [p["example"] for p in longest["train"]["prompts"]] == [3]
    assert longest.keys() == {"train"}
    assert "--example=99" in grpocli("data", *task, "--example", "99", code=2)[2]


def test_supervised_runs_show_the_answers_that_they_teach(task, grpocli) -> None:
    train = splits(grpocli, *task, "algorithm=sft", 'task.target_template="so {answer}"')["train"]
    assert train["prompts"][0]["target"] == "so 7<end>"
    assert train["answer_tokens"]["max"] == 5
    assert "taught, 5 tokens" in printed(grpocli, *task, "algorithm=sft", 'task.target_template="so {answer}"')


def test_text_of_the_data_cannot_control_the_terminal(tmp_path: Path, grpocli) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": f"{i}\u001b[31m<end>", "a\u001b[0m": "x"} for i in range(5)])
    supervised = ["task.answer_column=null", "reward=none", "algorithm=sft", "task.target_template=x"]
    shown = printed(grpocli, "task=jsonl", f"task.path={path}", *supervised)
    assert "\x1b" not in shown
    assert "have special tokens of the tokenizer in their own text" in shown


def test_mixtures_show_each_task(grpocli) -> None:
    given = ["task=[arithmetic,letter_counting]", "rollout.max_prompt_tokens=200"]
    shown = printed(grpocli, *given, "--rows", "20", "--prompts", "0")
    for name in ("arithmetic train", "arithmetic eval", "letter_counting train", "letter_counting eval"):
        assert name in shown
    assert "20 of 10,000 read" in shown


def test_conversations_that_end_with_the_answer_are_refused_as_by_a_run(tmp_path: Path, grpocli) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = write(tmp_path / "d.jsonl", [{"m": chat[: 1 + i % 2], "answer": f"{i}"} for i in range(4)])
    data = ["task=jsonl", f"task.path={path}", "task.prompt_column=m", f"task.eval_path={path}", "--split", "train"]
    assert "ends with the assistant's turn" in grpocli("data", *data, code=2)[2]
    assert splits(grpocli, *data, "algorithm=sft")["train"]["too_long"] == []
