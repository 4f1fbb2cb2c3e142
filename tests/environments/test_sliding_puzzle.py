"""The sliding puzzle environment."""

from __future__ import annotations

from typing import Any

import pytest

from grpocli.environments.environment import Environment
from grpocli.environments.sliding_puzzle import SlidingPuzzle, is_board, is_solved, show, slide, solved_board


def say(text: str) -> Any:
    return [{"role": "user", "content": "..."}, {"role": "assistant", "content": text}]


def test_tiles_slide_into_the_hole() -> None:
    board = [[1, 2, 3], [4, 0, 5], [7, 8, 6]]
    assert slide(board, "up") == [[1, 2, 3], [4, 8, 5], [7, 0, 6]]
    assert slide(board, "down") == [[1, 0, 3], [4, 2, 5], [7, 8, 6]]
    assert slide(board, "left") == [[1, 2, 3], [4, 5, 0], [7, 8, 6]]
    assert slide(board, "right") == [[1, 2, 3], [0, 4, 5], [7, 8, 6]]
    assert slide(solved_board(2), "up") is None
    assert show(board) == "1 2 3\n4 _ 5\n7 8 6"
    assert show(solved_board(4)).splitlines()[-1] == "13 14 15  _"


def test_a_solved_board_ends_the_episode() -> None:
    puzzle: Environment = SlidingPuzzle(illegal=-0.1)
    state = puzzle.reset({"board": [[1, 2, 3], [4, 0, 5], [7, 8, 6]], "answer": None})
    observation, reward, done, state = puzzle.step(say("first Left, I mean: left."), state)
    assert (observation[0]["content"], reward, done) == ("1 2 3\n4 5 _\n7 8 6", 0.0, False)
    observation, reward, done, state = puzzle.step(say("Left again"), state)
    assert (reward, done, state["board"]) == (-0.1, False, [[1, 2, 3], [4, 5, 0], [7, 8, 6]])
    observation, reward, done, state = puzzle.step(say("no, UP"), state)
    assert (observation, reward, done) == ([], 1.0, True)
    assert is_solved(state["board"])


def test_the_last_move_ends_the_episode() -> None:
    puzzle = SlidingPuzzle(moves=2, illegal=-0.5)
    state = puzzle.reset({"board": [[0, 1], [3, 2]]})
    step = puzzle.step(say("hm"), state)
    assert (step.reward, step.done) == (-0.5, False)
    assert puzzle.step(say("left"), step.metadata)[1:3] == (0.0, True)


@pytest.mark.parametrize("board", [None, "12", [[1, 2]], [[1, 1], [0, 2]], [[0]], [[1, 2], [3, 4]], [1, 2, 3, 0]])
def test_invalid_boards_are_refused(board: Any) -> None:
    assert not is_board(board)
    with pytest.raises(ValueError, match="needs an example with a `board`"):
        SlidingPuzzle().reset({"board": board})
