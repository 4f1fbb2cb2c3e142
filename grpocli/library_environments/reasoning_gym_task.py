"""task=reasoning_gym: any generator of the library reasoning-gym (arXiv 2505.24760)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import Escaped, part, require
from grpocli.errors import ConfigError
from grpocli.library_environments.reasoning_gym_reward import COLUMN, MISSING_LIBRARY, make
from grpocli.tasks.generated import is_held_out
from grpocli.tasks.task import BaseTask

if TYPE_CHECKING:
    from grpocli.tasks.task import Example

HELD_OUT = 1 / 10
"""Share of the questions that belong to `eval`."""
TRIES = 20
"""Questions made per question wanted, since small generators repeat questions."""


@part("task", "reasoning_gym")
class ReasoningGym(BaseTask):
    """Questions of a generator of reasoning-gym; `reward=[reasoning_gym]` scores with the generator's own scorer.

    The hash of a question puts it into `train` or `eval`, whatever the sizes are.
    """

    name: str = MISSING
    """Name of the generator."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the generator: `task.config.min_terms=2`."""
    instructions: Escaped = ""
    """Text after every question."""
    generator_seed: int = 0
    """Seed of the questions."""
    train_size: int = 1000
    """Most questions to train on."""
    eval_size: int = 100
    """Most questions to evaluate on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "train_size", self.train_size >= 1, "must be at least 1")
        require(self, "eval_size", self.eval_size >= 1, "must be at least 1")
        require(self, "generator_seed", self.generator_seed >= 0, "must be 0 or more")

    def check_ready(self) -> None:
        super().check_ready()
        if find_spec("reasoning_gym") is None:
            raise ConfigError(MISSING_LIBRARY, key="task", value="reasoning_gym")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, `answer`, and the settings that reproduce the question for the scorer."""
        limit = {"train": self.train_size, "eval": self.eval_size}[split]
        total = TRIES * (self.train_size + self.eval_size)
        found = _examples(self.name, json.dumps(self.config, sort_keys=True), self.generator_seed, total, split, limit)
        if not found:
            raise ConfigError(
                f"makes no question for {split}; choose another task.config", key="task.name", value=self.name
            )
        return [
            {**one, "prompt": [{"role": "user", "content": f"{one['question']}{self.instructions}"}]} for one in found
        ]


@lru_cache(maxsize=8)
def _examples(name: str, config: str, seed: int, total: int, split: str, limit: int) -> list[Example]:
    dataset = make(name, config, seed, total)
    found: list[Example] = []
    seen: set[str] = set()
    for index in range(total):
        if len(found) == limit:
            break
        entry = dataset[index]
        question = str(entry["question"])
        if question not in seen and split_of(question) == split:
            seen.add(question)
            place = {"name": name, "config": config, "seed": seed, "size": total, "index": index}
            found.append({"question": question, "answer": str(entry["answer"]), COLUMN: place})
    return found


def split_of(question: str) -> str:
    """`train` or `eval`."""
    return "eval" if is_held_out(question, HELD_OUT) else "train"
