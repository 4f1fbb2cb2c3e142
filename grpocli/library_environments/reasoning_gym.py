"""task=reasoning_gym, reward=[reasoning_gym]: the generators of reasoning-gym (arXiv 2505.24760), and their scorers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from typing import Any

from omegaconf import MISSING

from grpocli.answers.final_answer import after_thinking
from grpocli.config.parts import Escaped, check_regex, nearest, part, require
from grpocli.errors import ConfigError, config_errors
from grpocli.rewards.reward import BaseReward, Failure, Sample, Score
from grpocli.rewards.worker_pool import WorkerPool, score_items, shared_pool
from grpocli.tasks.generated import Generated, different
from grpocli.tasks.task import Example

COLUMN = "reasoning_gym"
"""The example's column with the source of its question: see `score`."""
TRIES = 20
"""Questions made per question wanted, since small generators repeat questions."""


@part("task", "reasoning_gym")
class ReasoningGym(Generated):
    """Questions of a generator of reasoning-gym; `reward=[reasoning_gym]` scores with the generator's own scorer.

    The hash of a question puts it into `train` or `eval`, whatever the sizes are.
    """

    name: str = MISSING
    """Name of the generator."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the generator: `task.config.min_terms=2`."""
    instructions: Escaped = ""
    """Text after every question."""
    train_size: int = 1000
    eval_size: int = 100

    def check_ready(self) -> None:
        super().check_ready()
        if find_spec("reasoning_gym") is None:
            raise ConfigError("needs a library: pip install reasoning-gym", key="task", value="reasoning_gym")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, `answer`, and the settings that reproduce the question for the scorer."""
        limit = {"train": self.train_size, "eval": self.eval_size}[split]
        total = TRIES * (self.train_size + self.eval_size)
        found = _examples(self.name, json.dumps(self.config, sort_keys=True), self.generator_seed, total, split, limit)
        if not found:
            problem = f"makes no question for {split}; choose another task.config"
            raise ConfigError(problem, key="task.name", value=self.name)
        return [
            {**one, "prompt": [{"role": "user", "content": f"{one['question']}{self.instructions}"}]} for one in found
        ]


@lru_cache(maxsize=8)
def _examples(name: str, config: str, seed: int, total: int, split: str, limit: int) -> list[Example]:
    dataset, place = make(name, config, seed, total), {"name": name, "config": config, "seed": seed, "size": total}
    made = (
        {"question": str(one["question"]), "answer": str(one["answer"]), COLUMN: {**place, "index": index}}
        for index, one in enumerate(dataset[i] for i in range(total))
    )
    return list(islice(different(made, split), limit))


@part("reward", "reasoning_gym", package="reward.reasoning_gym")
class ReasoningGymReward(BaseReward):
    """A score between 0 and 1, from the scorer of the generator that `task=reasoning_gym` names."""

    scores_independently = True
    checks_answers = True
    pattern: str = r"<answer>(.*?)</answer>"
    """Regular expression whose first group is the answer; the last match counts. Without a match, the answer is all
    that follows the thinking part."""
    timeout: float = 20.0
    """Seconds for a sample; one that takes longer scores 0."""
    workers: int = 0
    """Worker processes; 0: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_regex(self, "pattern", group="the answer")
        require(self, "timeout", self.timeout > 0, "must be above 0 seconds")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        known = [i for i, sample in enumerate(samples) if COLUMN in sample.columns]
        scores: list[Score] = [Failure("the example is not of task=reasoning_gym")] * len(samples)
        items = [[samples[i].columns[COLUMN], self.answer(samples[i].text)] for i in known]
        empty = [[samples[i].columns[COLUMN], ""] for i in known]
        for i, score in zip(known, score_items(self._pool(), items, empty), strict=True):
            scores[i] = score
        return scores

    def vote(self, sample: Sample) -> str:
        return self.answer(sample.text)

    def answer(self, text: str) -> str:
        """The answer in a completion's text."""
        text = after_thinking(text)
        found = re.findall(self.pattern, text, re.DOTALL)
        last = found[-1] if found else text
        return (last if isinstance(last, str) else last[0]).strip()

    def close(self) -> None:
        self._pool().close()

    def _pool(self) -> WorkerPool:
        return shared_pool("grpocli.library_environments.reasoning_gym:score", self.workers, self.timeout)


def score(source: dict[str, Any], answer: str) -> float:
    """The score of an answer. Runs in a worker process.

    source: name, config, seed and size of the dataset, and the question's index. From these the library makes the
    question again, with the data that its scorer needs.
    """
    dataset = make(source["name"], source["config"], source["seed"], source["size"])
    return float(dataset.score_answer(answer, dataset[source["index"]]))


@lru_cache(maxsize=32)
def make(name: str, config: str, seed: int, size: int) -> Any:
    """A dataset of the library, which makes its entries on access. Raises ConfigError."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no such generator{nearest(name, DATASETS)}", key="task.name", value=name)
    refusals = TypeError, ValueError, AssertionError
    with config_errors(*refusals, says=f"{name} refuses it: {{}}", key="task.config", value=config):
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
