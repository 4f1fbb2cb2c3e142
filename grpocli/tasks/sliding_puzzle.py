"""task=sliding_puzzle: boards made here, solved turn by turn in an environment."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from grpocli.config.parts import part, require
from grpocli.environments.environment import Play
from grpocli.environments.sliding_puzzle import MOVES, Board, is_solved, show, slide, solved_board
from grpocli.tasks.split import is_held_out
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

HELD_OUT = 1 / 10
"""The share of all boards that belongs to `eval`."""
TRIES = 50
"""Random walks for each board that is wanted; small boards have few that differ."""
INSTRUCTIONS = "Slide the tiles until they are in order. Each turn, name one move: up, down, left or right.\n"


@part("task", "sliding_puzzle")
class SlidingPuzzles(BaseTask):
    """Square boards, shuffled from the solved one, with the environment `SlidingPuzzle`.

    size: of the board. shuffles: random moves away from the solved board, at least 1; more are harder.
    train_size, eval_size: at most so many boards; small boards have fewer.
    A board belongs to `train` or to `eval` by its hash, whatever the sizes are.
    """

    environment: Play = Play(name="grpocli.environments.sliding_puzzle:SlidingPuzzle")
    size: int = 3
    shuffles: int = 4
    train_size: int = 1000
    eval_size: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "size", 2 <= self.size <= 6, "must be between 2 and 6")
        require(self, "shuffles", self.shuffles >= 1, "must be at least 1")
        require(self, "train_size", self.train_size >= 1, "must be at least 1")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")

    def examples(self, split: str) -> Sequence[Example]:
        """`prompt` and `board` of `train` or `eval`; the same on every machine."""
        return _examples(self.size, self.shuffles, split, {"train": self.train_size, "eval": self.eval_size}[split])


@lru_cache(maxsize=8)
def _examples(size: int, shuffles: int, split: str, most: int) -> Sequence[Example]:
    boards = (board for board in _boards(size, shuffles, TRIES * most) if split_of(board) == split)
    return [
        {"prompt": [{"role": "user", "content": INSTRUCTIONS + show(board)}], "board": board}
        for board in islice(boards, most)
    ]


def _boards(size: int, shuffles: int, tries: int) -> Iterator[Board]:
    """Different ones, none solved."""
    walk, seen = random.Random(size * 1000 + shuffles), set[str]()
    for _ in range(tries):
        board = solved_board(size)
        for _ in range(shuffles):
            board = walk.choice([after for move in MOVES if (after := slide(board, move))])
        if not is_solved(board) and show(board) not in seen:
            seen.add(show(board))
            yield board


def split_of(board: Board) -> str:
    """`train` or `eval`."""
    return "eval" if is_held_out(show(board), HELD_OUT) else "train"
