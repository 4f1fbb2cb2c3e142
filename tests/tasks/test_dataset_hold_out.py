"""`hold_out` takes whole questions, whatever the order of rows."""

from __future__ import annotations

import pytest

from grpocli.tasks.dataset import hold_out

ROWS = [{"q": f"{i}", "n": i} for i in range(20)]


@pytest.mark.parametrize(("rows", "most", "held_out"), [(2, 128, 1), (20, 128, 4), (20, 3, 3)])
def test_at_least_one_and_at_most_a_fifth_is_held_out(rows: int, most: int, held_out: int) -> None:
    train, evaluate = hold_out(ROWS[:rows], ["q"], most)
    assert len(evaluate) == held_out
    assert sorted(train + evaluate) == list(range(rows))


def test_equal_questions_are_in_the_same_split() -> None:
    rows = [{"q": str(i % 10)} for i in range(100)]
    train, evaluate = hold_out(rows, ["q"], 128)
    assert len(evaluate) == 20
    assert not {rows[i]["q"] for i in train} & {rows[i]["q"] for i in evaluate}


def test_rows_of_a_single_question_are_divided() -> None:
    train, evaluate = hold_out([{"q": "same"}] * 10, ["q"], 128)
    assert (len(train), len(evaluate)) == (8, 2)


def test_the_order_of_rows_does_not_matter() -> None:
    chosen = [{rows[i]["q"] for i in hold_out(rows, ["q"], 4)[1]} for rows in (ROWS, ROWS[::-1])]
    assert chosen[0] == chosen[1]


def test_messages_count_as_questions() -> None:
    rows = [{"q": [{"role": "user", "content": str(i)}]} for i in range(5)]
    assert len(hold_out(rows, ["q"], 1)[1]) == 1
