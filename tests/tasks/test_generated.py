"""Generated tasks: the same on every machine, disjoint splits, right answers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards.rule_based import Number
from grpocli.tasks.generated import HELD_OUT, OPERATIONS, Arithmetic, Generated, LetterCounting, is_held_out


def test_splits_are_reproducible_and_disjoint() -> None:
    task = LetterCounting
    made = task(train_size=60, eval_size=20)
    train, held_out = made.examples("train"), made.examples("eval")
    texts = [str(one["prompt"]) for one in [*train, *held_out]]
    assert len(set(texts)) == len(texts)
    assert train == task(train_size=60, eval_size=5).examples("train")
    assert held_out[:5] == task(train_size=3, eval_size=5).examples("eval")


def test_letters_are_counted(sample) -> None:
    examples = LetterCounting(train_size=200).examples("train")
    assert all(one["answer"] == str(one["word"].count(one["letter"])) for one in examples)
    assert {one["answer"] for one in examples} >= {"0", "1", "2"}
    assert Number()([sample(f"It is {one['answer']}.", **one) for one in examples]) == [1.0] * 200


def test_settings_without_examples_give_a_one_sentence_error() -> None:
    class Same(Generated):
        def make(self, random: Any) -> Any:
            return {"question": "the same again"}

    empty = "train" if is_held_out("the same again", HELD_OUT) else "eval"
    with pytest.raises(ConfigError, match=f"leave no example for {empty}"):
        Same().examples(empty)


def questions(task: Arithmetic, split: str) -> list[str]:
    return [example["prompt"][0]["content"] for example in task.examples(split)]


@pytest.mark.parametrize("digits", [1, 2, 3, 9])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_answers_are_right(digits: int, operation: str) -> None:
    for example in Arithmetic(digits=digits, operation=operation, train_size=50).examples("train"):
        assert example["prompt"][0]["role"] == "user"
        first, second = example["prompt"][0]["content"].removesuffix("=").split(operation)
        assert len(first) == len(second) == digits
        assert int(example["answer"]) == OPERATIONS[operation](int(first), int(second))


@pytest.mark.parametrize("digits", [1, 2])
def test_the_splits_are_disjoint_and_cover_every_pair(digits: int) -> None:
    task = Arithmetic(digits=digits)
    train, held_out = questions(task, "train"), questions(task, "eval")
    assert len(set(train)) == len(train)
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == {1: 100, 2: 8100}[digits]
    assert 0.05 < len(held_out) / len(train) < 0.2


def test_a_pair_keeps_its_split_when_the_sizes_change() -> None:
    small = Arithmetic(digits=3, train_size=2000, eval_size=20)
    large = Arithmetic(digits=3, train_size=20, eval_size=2000)
    assert not set(questions(small, "train")) & set(questions(large, "eval"))
    assert questions(small, "eval") == questions(large, "eval")[:20]


def test_the_first_problems_cover_the_range() -> None:
    first = [int(q.split("+")[0]) for q in questions(Arithmetic(), "eval")[:128]]
    assert min(first) < 15
    assert max(first) > 94
    assert 45 < sum(first) / len(first) < 64


def test_the_default_problems_are_pinned() -> None:
    """If this changes, old and new runs cannot be compared, which belongs in the changelog."""
    lines = "\n".join(questions(Arithmetic(), "train") + questions(Arithmetic(), "eval"))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == "c015e790270b7906"
