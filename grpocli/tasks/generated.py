"""The base of tasks whose examples are made from a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from grpocli.config.parts import require, section
from grpocli.errors import ConfigError
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grpocli.tasks.task import Example

HELD_OUT = 1 / 10
"""Share of the examples that belong to `eval`."""
TRIES = 50
"""Examples made per example wanted, since small tasks repeat examples."""


def is_held_out(text: str, share: float) -> bool:
    """True for about `share` of all texts, in 256ths."""
    return hashlib.sha256(text.encode()).digest()[0] < share * 256


@section("task")
class Generated(BaseTask):
    """Base of tasks whose examples are made from a seed.

    The hash of an example puts it into `train` or `eval`, whatever the sizes are.
    """

    train_size: int = 10000
    """Most different examples to train on; small tasks have fewer."""
    eval_size: int = 500
    """Most different examples to evaluate on; small tasks have fewer."""
    generator_seed: int = 0
    """Seed of the examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "train_size", self.train_size >= 1, "must be at least 1")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")
        require(self, "generator_seed", self.generator_seed >= 0, "must be 0 or more")

    def make(self, random: random.Random) -> Example:
        """An example without its prompt: the column `question`, and further columns."""
        raise NotImplementedError

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of `train` or `eval`; the same on every machine."""
        limit = {"train": self.train_size, "eval": self.eval_size}[split]
        found = list(islice(self._different(split, TRIES * limit), limit))
        if not found:
            raise ConfigError(
                f"these settings leave no example for {split}", key="task", hint="choose larger questions"
            )
        return [{**one, "prompt": [{"role": "user", "content": one["question"]}]} for one in found]

    def _different(self, split: str, tries: int) -> Iterator[Example]:
        source, seen = random.Random(self.generator_seed), set[str]()
        for _ in range(tries):
            example = self.make(source)
            question = example["question"]
            if question not in seen and is_held_out(question, HELD_OUT) == (split == "eval"):
                seen.add(question)
                yield example
