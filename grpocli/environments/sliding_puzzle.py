"""A sliding puzzle: the model moves tiles on a square board with one hole until they are in order."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from grpocli.environments.environment import Step
from grpocli.types import Message

Board: TypeAlias = list[list[int]]  # 0 is the hole

MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Position of the tile that moves, relative to the hole: (rows, columns)."""
MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


class SlidingPuzzle:
    """Makes the last move named in a turn: up, down, left or right, the direction in which a tile slides into the hole.

    solved: reward for the solved board, which ends the episode. illegal: reward of a turn without a legal move.
    moves: number of turns after which the episode ends. role: of the messages that show the board.
    """

    def __init__(self, solved: float = 1.0, illegal: float = 0.0, moves: int = 8, role: str = "user") -> None:
        self.solved, self.illegal, self.moves, self.role = solved, illegal, moves, role

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The state of a new episode. Raises ValueError if the example has no board."""
        board = metadata.get("board")
        if not is_board(board):
            raise ValueError(f"the puzzle needs an example with a `board`, rows of the numbers from 0, not {board!r}")
        return {"board": board, "made": 0}

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        named = MOVE.findall(messages[-1]["content"])
        moved = slide(metadata["board"], named[-1].lower()) if named else None
        board, made = moved or metadata["board"], metadata["made"] + 1
        reward = self.solved if is_solved(board) else (0.0 if moved else self.illegal)
        over = is_solved(board) or made >= self.moves
        shown: list[Message] = [] if over else [{"role": self.role, "content": show(board)}]
        return Step(shown, reward, over, {"board": board, "made": made})


def solved_board(size: int) -> Board:
    """The numbers from 1 in order, then the hole."""
    numbers = [*range(1, size * size), 0]
    return [numbers[row * size : (row + 1) * size] for row in range(size)]


def is_solved(board: Board) -> bool:
    return board == solved_board(len(board))


def is_board(board: Any) -> bool:
    """Whether the value is a square board of the numbers from 0, each once."""
    if not isinstance(board, list) or not all(isinstance(row, list) and len(row) == len(board) for row in board):
        return False
    return len(board) > 1 and sorted(number for row in board for number in row) == list(range(len(board) ** 2))


def slide(board: Board, move: str) -> Board | None:
    """The board after a move; None if the move is illegal."""
    row, column = next((r, c) for r, line in enumerate(board) for c, number in enumerate(line) if number == 0)
    down, right = MOVES[move]
    tile_row, tile_column = row + down, column + right
    if not (0 <= tile_row < len(board) and 0 <= tile_column < len(board)):
        return None
    after = [list(line) for line in board]
    after[row][column], after[tile_row][tile_column] = after[tile_row][tile_column], 0
    return after


def show(board: Board) -> str:
    """The board as text: one line per row, the hole as `_`."""
    width = len(str(len(board) ** 2 - 1))
    return "\n".join(" ".join(f"{number or '_':>{width}}" for number in row) for row in board)
