"""Contradictions between keys, found before anything heavy starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.config.schema import Run


def check_run(run: Run) -> None:
    """Raise a ConfigError for the first contradiction."""
    _check_rewards(run)
    _check_difficulty(run)
    _check_batch(run)


def _check_rewards(run: Run) -> None:
    if not run.reward:
        raise ConfigError("reward=[]: choose at least one reward")
    names = list(run.reward)
    for key, name in (
        ("eval.reward", run.eval.reward),
        ("algorithm.question_weight.reward", run.algorithm.question_weight.reward),
        ("algorithm.keep.reward", run.algorithm.keep.reward),
    ):
        if name is not None and name not in names:
            raise ConfigError.of(
                key, name, f"choose one of this run's rewards: {', '.join(names)}{nearest(name, names)}"
            )


def _check_difficulty(run: Run) -> None:
    from grpocli.algorithm.question_weight import Difficulty
    from grpocli.rewards.reward import Correctness

    weight = run.algorithm.question_weight
    if not isinstance(weight, Difficulty):
        return
    name = weight.reward or next(iter(run.reward))
    reward = run.reward[name]
    if isinstance(reward, Correctness) and (reward.right, reward.wrong) != (1, 0):
        raise ConfigError.of(
            "algorithm.question_weight.reward",
            name,
            f"difficulty reads an accuracy from it: leave reward.{name}.right=1 and reward.{name}.wrong=0, "
            "or name another reward",
        )


def _check_batch(run: Run) -> None:
    if run.train.minibatches > run.rollout.prompts_per_step:
        raise ConfigError.of(
            "train.minibatches",
            run.train.minibatches,
            f"must be at most rollout.prompts_per_step={run.rollout.prompts_per_step}: an update needs a group",
        )
    longest = run.rollout.max_prompt_tokens + run.rollout.max_completion_tokens
    if run.train.micro_batch_tokens < longest:
        raise ConfigError.of(
            "train.micro_batch_tokens",
            run.train.micro_batch_tokens,
            f"must be at least rollout.max_prompt_tokens + rollout.max_completion_tokens = {longest}: "
            "a micro-batch holds whole completions",
        )
