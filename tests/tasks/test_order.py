"""task.order and mixtures: what is drawn follows from the seed and the number of the draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonl import write

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.tasks.order import TaskScheduler, difficulty_of, permutation, problem_order
from grpocli.tasks.prompt_source import PromptSource
from grpocli.tasks.table import Jsonl


@given(n=st.integers(1, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(problem_order(n, "shuffled", None, seed, epoch)) == list(range(n))


def test_the_order_is_pinned() -> None:
    assert [permutation(6, 0, epoch).tolist() for epoch in range(2)] == [[3, 2, 1, 0, 4, 5], [4, 5, 1, 2, 0, 3]]


@given(
    weights=st.lists(st.floats(0.05, 10), min_size=2, max_size=6), seed=st.integers(0, 2**40), at=st.integers(0, 9999)
)
def test_tasks_keep_their_shares_in_every_part_of_the_order(weights: list[float], seed: int, at: int) -> None:
    rotation = TaskScheduler(weights, seed)
    stretch = Counter(rotation.of(draw)[0] for draw in range(at, at + 200))
    for task, weight in enumerate(weights):
        assert abs(stretch[task] - 200 * weight / sum(weights)) < 6


def test_the_count_of_a_tasks_draws_does_not_depend_on_the_order_of_calls() -> None:
    rotation, counts = TaskScheduler([1, 2, 1], seed=5), Counter[int]()
    late = TaskScheduler([1, 2, 1], seed=5).of(5000)
    for draw in range(5001):
        found = rotation.of(draw)
        assert found[1] == counts[found[0]]
        counts[found[0]] += 1
    assert found == late
    assert [TaskScheduler([1, 2, 1], seed=s).of(0) for s in range(9)] != [rotation.of(0)] * 9


N = 12


@pytest.fixture
def source(tmp_path: Path, plain_tokenizer: Any) -> Callable[..., PromptSource]:
    """The prompts of a run on N problems, with these keys of its task. `level` falls with the row, `rate` is text."""
    rows = [{"prompt": "abcdefghijkl"[i], "answer": "a", "level": N - i, "rate": f"0.{i % 4}"} for i in range(N)]
    train, held_out = (
        write(tmp_path / "train.jsonl", rows),
        write(tmp_path / "eval.jsonl", [{**rows[0], "prompt": "m"}]),
    )
    run = build_run(compose([]))

    def make(**keys: Any) -> PromptSource:
        return PromptSource.of(replace(run, task=Jsonl(path=train, eval_path=held_out, **keys)), plain_tokenizer)

    return make


def drawn(data: PromptSource, draws: int) -> list[int]:
    return [int(data.draw(number).row or 0) for number in range(draws)]


def test_prompts_are_drawn_in_the_order_of_the_task(source: Any) -> None:
    shuffled = drawn(source(), 3 * N)
    assert shuffled == [row for epoch in range(3) for row in permutation(N, 0, epoch)]
    assert drawn(source(order="file"), 2 * N + 3) == [d % N for d in range(2 * N + 3)]
    for column, key in (("level", lambda row: N - row), ("-level", lambda row: row), ("rate", lambda row: row % 4)):
        data = source(order="difficulty", difficulty_column=column)
        found = drawn(data, 2 * N)
        for epoch, rows in enumerate((found[:N], found[N:])):
            place = shuffled[epoch * N : (epoch + 1) * N].index
            assert rows == sorted(range(N), key=lambda row: (key(row), place(row))), "ties as in the shuffled order"
        assert [data.draw(d).row for d in (2 * N - 1, 3)] == [found[-1], found[3]]


def test_values_of_a_column_are_numbers_or_text() -> None:
    def difficulty(column: str, *values: Any) -> list[float]:
        return difficulty_of(values, column, "row {}".format).tolist()

    assert difficulty("d", 3, "1.5", 2) == [3, 1.5, 2]
    assert difficulty("-d", 3, 1) == [-3, -1]
    assert difficulty("d", "Level 5", "Level 2", "Level 2") == [1, 0, 0]
    for wrong in (["task.order=random"], ["task.difficulty_column=level"]):
        with pytest.raises(ConfigError) as refused:
            build_run(compose(wrong))
        assert refused.value.key == wrong[0].partition("=")[0]
    for values in ((1, None), (float("nan"), 1), ("", "a"), ([1], [2])):
        with pytest.raises(ConfigError, match=r"row \d has .* there") as refused:
            difficulty("d", *values)
        assert refused.value.key == "task.difficulty_column"
