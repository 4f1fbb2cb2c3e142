"""task.shots: worked examples before every prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks.table import Gsm8k, Jsonl


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "d.jsonl", [{"prompt": f"Q{i % 10}", "answer": f"A{i % 10}"} for i in range(20)])


def questions(example: dict[str, Any]) -> list[str]:
    """The questions in a plain-text prompt."""
    return [part.split("A")[0] for part in example["prompt"].split("\n\n")]


def test_shots_are_used_neither_for_training_nor_for_evaluation(file: str) -> None:
    task = Jsonl(path=file, shots=3, eval_size=2)
    train, held_out = task.examples("train"), task.examples("eval")
    *shown, _ = questions(train[0])
    assert len(set(shown)) == 3
    assert all(questions(one)[:-1] == shown for one in (*train, *held_out))
    assert all(len(questions(one)) == 4 for one in held_out)
    assert not set(shown) & {questions(one)[-1] for one in held_out}
    assert {questions(one)[-1] for one in (*train, *held_out)} == {f"Q{i}" for i in range(10)} - set(shown)


def test_the_seed_chooses_the_shots(file: str) -> None:
    chosen = [questions(Jsonl(path=file, shots=3, shot_seed=seed).examples("train")[0])[:-1] for seed in (0, 1, 0)]
    assert chosen[0] == chosen[2] != chosen[1]
    run: Any = build_run(compose(["task=jsonl", f"task.path={file}", "task.shots=3", "seed=1"]))
    assert questions(run.task.examples("train")[0])[:-1] == chosen[1]


def test_shots_may_be_plain_text(file: str) -> None:
    task = Jsonl(path=file, shots=2, prompt_template="Q: {prompt}\nA:", shot_template=" {answer}", prefix="> ")
    first, second, asked = str(task.examples("train")[0]["prompt"]).split("\n\n")
    assert asked.startswith("> Q: Q")
    for shot in (first, second):
        number = shot[-1]
        assert shot == f"> Q: Q{number}\nA: A{number}"


def test_conversations_have_one_system_message(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "Old."}, {"role": "user", "content": f"Q{i}"}], "answer": f"A{i}"}
        for i in range(6)
    ]
    task = Jsonl(path=write(tmp_path / "c.jsonl", rows), shots=2, system_prompt="New.")
    prompt = task.examples("train")[0]["prompt"]
    assert [message["role"] for message in prompt] == ["system", *["user", "assistant"] * 2, "user"]
    assert prompt[0]["content"] == "New."
    assert prompt[2]["content"] == prompt[1]["content"].replace("Q", "A")
    rows = [{"question": f"{i} + 1?", "answer": f"One more than {i}.\n#### {i + 1}"} for i in range(6)]
    _, said, _ = Gsm8k(path=write(tmp_path / "g.jsonl", rows), shots=1).examples("train")[0]["prompt"]
    number = int(said["content"].split("than ")[1].split(".")[0])
    assert said["content"] == f"One more than {number}.\nThe answer is \\boxed{{{number + 1}}}."


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"shots": -1}, "task.shots"),
        ({"shots": 1, "streaming": True}, "task.shots"),
        ({"shots": 10}, "task.shots"),
        ({"shots": 1, "shot_template": "{anser}"}, "task.shot_template"),
        ({"shots": 1, "shot_template": "{answer"}, "task.shot_template"),
        ({"shots": 1, "shot_template": "{answer:d}"}, "task.shot_template"),
    ],
)
def test_unusable_shots_are_refused(file: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Jsonl(path=file, eval_size=2, **settings).examples("train")
    assert refused.value.key == key
