"""Generated tasks: the same on every machine, disjoint splits, right answers."""

from __future__ import annotations

from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards.reward import Failure, Sample
from grpocli.rewards.text_match import Number
from grpocli.tasks.generated import (
    HELD_OUT,
    Countdown,
    CountdownReward,
    Generated,
    LetterCounting,
    SlidingPuzzles,
    is_held_out,
    reaches,
)
from grpocli.types import Completion, Prompt, Rollout


def sample(columns: dict[str, Any], text: str) -> Any:
    return Sample.of(Rollout(Prompt("0", [1], "?", columns), Completion([1], [0.0], "stop", 0), text), 99)


@pytest.mark.parametrize("task", [Countdown, LetterCounting, SlidingPuzzles])
def test_splits_are_reproducible_and_disjoint(task: Any) -> None:
    made = task(train_size=60, eval_size=20)
    train, held_out = made.examples("train"), made.examples("eval")
    texts = [str(one["prompt"]) for one in [*train, *held_out]]
    assert len(set(texts)) == len(texts)
    assert train == task(train_size=60, eval_size=5).examples("train")
    assert held_out[:5] == task(train_size=3, eval_size=5).examples("eval")


@pytest.mark.slow
def test_settings_without_evaluation_examples_give_a_one_sentence_error() -> None:
    assert SlidingPuzzles(shuffles=1).examples("train")
    with pytest.raises(ConfigError, match="these settings leave no example for eval"):
        SlidingPuzzles(shuffles=1).examples("eval")


def test_countdown_has_a_solution_for_every_question() -> None:
    reward = CountdownReward()
    for numbers in (2, 4, 6):
        for one in Countdown(numbers=numbers, train_size=50).examples("train"):
            right, wrong = f"so: <answer>{one['answer']} = {one['target']}</answer>", "<answer>1 + 1</answer>"
            assert reward([sample(one, right), sample(one, one["answer"]), sample(one, "")]) == [1.0, 1.0, 0.0]
            assert len(one["numbers"]) == numbers
            assert reward([sample(one, wrong)]) == [0.0]


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        *(("(19 - 7) * 3", True), ("3*(19-7)=36", True), ("19*3-7*3", False), ("36", False), ("19 - 7", False)),
        *((" ", False), ("(19 - 7) * 3 / 0", False), ("__import__('os').abort()", False), ("3**19-7", False)),
        *(("(" * 400 + "19", False), ("True", False), ("(19.0 - 7) * 3", False)),
    ],
)
def test_countdown_checks_expressions(expression: str, fits: bool) -> None:
    assert reaches(expression, [3, 7, 19], 36) is fits


def test_countdown_needs_its_columns() -> None:
    (score,) = CountdownReward()([sample({"target": 3}, "1+2")])
    assert isinstance(score, Failure)


def test_letters_are_counted() -> None:
    examples = LetterCounting(train_size=200).examples("train")
    assert all(one["answer"] == str(one["word"].count(one["letter"])) for one in examples)
    assert {one["answer"] for one in examples} >= {"0", "1", "2"}
    assert Number()([sample(one, f"It is {one['answer']}.") for one in examples]) == [1.0] * 200


def test_settings_without_examples_give_a_one_sentence_error() -> None:
    class Same(Generated):
        def make(self, random: Any) -> Any:
            return {"question": "the same again"}

    empty = "train" if is_held_out("the same again", HELD_OUT) else "eval"
    with pytest.raises(ConfigError, match=f"leave no example for {empty}"):
        Same().examples(empty)
