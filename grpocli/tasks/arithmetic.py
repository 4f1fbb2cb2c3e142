"""task=arithmetic: generated problems with two numbers and an operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from grpocli.config.parts import one_of, part, require
from grpocli.tasks.generated import is_held_out
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

STRIDE = 2654435761
"""A prime near 2**32 divided by the golden ratio. It does not divide the number of pairs, whose prime factors are 2, 3
and 5, so its multiples visit every pair once; the first n of them are spread evenly."""

HELD_OUT = 26 / 256
"""Share of the pairs that belong to `eval`."""


@part("task", "arithmetic")
class Arithmetic(BaseTask):
    """Problems like `47+85=` with the answer `132`, as a conversation of one message.

    The hash of a pair of operands puts it into `train` or `eval`, whatever the sizes are.
    """

    digits: int = 2
    """Digits of both operands, 1 to 9: 2 is 10 to 99, 1 is 0 to 9."""
    operation: str = "+"
    """`+`, `-` or `*`."""
    train_size: int = 10000
    """Most problems to train on; fewer if there are fewer pairs."""
    eval_size: int = 1000
    """Most problems to evaluate on; fewer if there are fewer pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "digits", 1 <= self.digits <= 9, "must be between 1 and 9")
        one_of(self, "operation", OPERATIONS)
        require(self, "train_size", self.train_size >= 1, "must be at least 1")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt` and `answer`; the same on every machine."""
        limit = {"train": self.train_size, "eval": self.eval_size}[split]
        return _examples(self.operation, self.digits, split, limit)


@lru_cache(maxsize=8)
def _examples(operation: str, digits: int, split: str, limit: int) -> Sequence[Example]:
    chosen = (pair for pair in _pairs(digits) if split_of(operation, *pair) == split)
    return [_example(operation, *pair) for pair in islice(chosen, limit)]


def _pairs(digits: int) -> Iterator[tuple[int, int]]:
    """Every pair of operands once, in a pseudo-random order."""
    low = 10 ** (digits - 1) if digits > 1 else 0
    values = 10**digits - low
    total = values**2
    for i in range(total):
        first, second = divmod(i * STRIDE % total, values)
        yield low + first, low + second


def split_of(operation: str, first: int, second: int) -> str:
    """`train` or `eval`."""
    return "eval" if is_held_out(f"{first}{operation}{second}", HELD_OUT) else "train"


def _example(operation: str, first: int, second: int) -> Example:
    return {
        "prompt": [{"role": "user", "content": f"{first}{operation}{second}="}],
        "answer": str(OPERATIONS[operation](first, second)),
    }
