"""Prompts that end with the assistant's turn: `task.last_turn`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.rewards.reward import Sample
from grpocli.tasks.prompt_source import PromptSource
from grpocli.types import Completion, Rollout

TINY = make_tokenizer()
CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "so 2"}]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    rows = [{"m": [{**CHAT[0], "content": f"{i}+1="}, CHAT[1]], "answer": str(i + 1)} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompt_of_first_draw(path: str, *overrides: str) -> Any:
    given = ["task=jsonl", f"task.path={path}", "task.prompt_column=m", "reward=[exact_match]", *overrides]
    return PromptSource.of(build_run(compose(given)), TINY).draw(0)


SUPERVISED = ("algorithm=sft",)
STREAMED = ("task.streaming=true", "task.eval_size=1")
PLAIN = ("task.format=plain",)
SHOWN = "<bos><user>N+1=<end><assistant>"


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["task.last_turn=continue"], SHOWN + "so 2"),
        (["task.last_turn=continue", *STREAMED], SHOWN + "so 2"),
        (["task.last_turn=drop"], SHOWN),
        (["task.last_turn=drop", *STREAMED], SHOWN),
        (["task.last_turn=continue", *PLAIN], "N+1=\nso 2"),
        (["task.last_turn=drop", *PLAIN], "N+1="),
        (["task.last_turn=continue", "task.shots=1"], SHOWN + "A<end><user>N+1=<end><assistant>so 2"),
        (["task.last_turn=drop", "task.shots=1"], SHOWN + "A<end><user>N+1=<end><assistant>"),
    ],
)
def test_the_model_goes_on_with_the_turn_or_begins_it(data: str, overrides: list[str], tokens: str) -> None:
    written = TINY.decode(prompt_of_first_draw(data, *overrides).token_ids)
    for digit in "0123456789":
        written = written.replace(f"{digit}+1=", "N+1=").replace(f"{digit}<end>", "A<end>")
    assert written == tokens


@pytest.mark.parametrize("overrides", [(), STREAMED, PLAIN, ("task.shots=1",)])
def test_without_the_key_the_row_is_refused(data: str, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        prompt_of_first_draw(data, *overrides)
    assert refused.value.key == "task.last_turn"
    assert re.search(r"row \d|example \d", str(refused.value))


@pytest.mark.parametrize(
    ("last_turn", "prompt", "target"),
    [("null", SHOWN, "so 2<end>"), ("drop", SHOWN, "so 2<end>"), ("continue", SHOWN + "so 2", "A<end>")],
)
def test_supervised_training_teaches_the_turn_or_what_follows_it(
    data: str, last_turn: str, prompt: str, target: str
) -> None:
    drawn = prompt_of_first_draw(data, *SUPERVISED, f"task.last_turn={last_turn}")
    number = drawn.columns["answer"]
    assert TINY.decode(drawn.token_ids).replace(f"{int(number) - 1}+", "N+") == prompt
    assert TINY.decode(drawn.target_ids) == target.replace("A", number)


def test_rewards_get_the_turn_that_the_model_went_on_with(data: str) -> None:
    prompt = prompt_of_first_draw(data, "task.last_turn=continue")
    sample = Sample.of(Rollout(prompt, Completion([1], [0.0], "stop", 0), " ok"), 8)
    assert (sample.text, sample.completion) == ("so 2 ok", [{"role": "assistant", "content": "so 2 ok"}])
    assert [message["role"] for message in sample.prompt] == ["user"]


def test_a_task_with_tools_begins_its_turns() -> None:
    given = ["task=jsonl", "task.path=x", "task.last_turn=continue", "task.tools=[calculator]"]
    with pytest.raises(ConfigError) as refused:
        build_run(compose(given))
    assert refused.value.key == "task.last_turn"
