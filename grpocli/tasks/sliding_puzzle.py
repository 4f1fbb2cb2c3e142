"""task=sliding_puzzle: boards made here, solved turn by turn in an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.config.parts import part, require
from grpocli.environments.environment import EnvironmentConfig
from grpocli.environments.sliding_puzzle import MOVES, is_solved, show, slide, solved_board
from grpocli.tasks.generated import Generated

if TYPE_CHECKING:
    import random

    from grpocli.tasks.task import Example

INSTRUCTIONS = "Slide the tiles until they are in order. Each turn, name one move: up, down, left or right.\n"


@part("task", "sliding_puzzle")
class SlidingPuzzles(Generated):
    """Square boards, shuffled from the solved one, with the environment `SlidingPuzzle`."""

    environment: EnvironmentConfig = EnvironmentConfig(name="grpocli.environments.sliding_puzzle:SlidingPuzzle")
    size: int = 3
    """Width and height of the board, 2 to 6."""
    shuffles: int = 4
    """Random moves away from the solved board, at least 1; more are harder."""
    train_size: int = 1000
    eval_size: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "size", 2 <= self.size <= 6, "must be between 2 and 6")
        require(self, "shuffles", self.shuffles >= 1, "must be at least 1")

    def make(self, random: random.Random) -> Example:
        """A board that is not solved."""
        board = solved_board(self.size)
        while is_solved(board):
            for _ in range(self.shuffles):
                board = random.choice([after for move in MOVES if (after := slide(board, move))])
        return {"question": INSTRUCTIONS + show(board), "board": board}
