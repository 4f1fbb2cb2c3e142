"""The shape of a run: what `conf/train.yaml` composes and one `instantiate` turns into live objects."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from grpocli.config.parts import Escaped, one_of, part, require, section
from grpocli.errors import ConfigError
from grpocli.types import Sampling

MOST_COMPLETIONS = 10_000_000


@section("train")
class Train:
    """How long and in which pieces the policy is updated.

    steps: rollout-and-update rounds.
    epochs: passes over each step's rollouts (the papers' mu).
    minibatches: optimizer updates per pass.
    micro_batch_tokens: tokens (padding included) in one forward; bounds memory, never changes the gradient.
    gradient_checkpointing: recompute activations in the backward pass to save memory.
    packed: rows end to end, each prompt once for its group, where the model's attention allows it; false: side by side
        with padding.
    """

    steps: int = 60
    epochs: int = 1
    minibatches: int = 1
    micro_batch_tokens: int = 8192
    gradient_checkpointing: bool = False
    packed: bool = True

    def __post_init__(self) -> None:
        for field in ("steps", "epochs", "minibatches", "micro_batch_tokens"):
            require(self, field, getattr(self, field) >= 1, "must be at least 1")

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches


@section("rollout")
class Rollouts:
    """What is sampled in a step: `prompts_per_step` x `group_size` completions.

    long_prompts: what happens to prompts over `max_prompt_tokens`: `drop` them, or `truncate` from the left.
    repetition_penalty: divides the positive logits of tokens that stand in the prompt or earlier in the completion,
        multiplies the negative ones; 1 is none. The trainer scores tokens under the same penalty.
    stop: strings that end a completion (`["\\n\\n"]` is two line breaks). The token that completes one is the last;
        rewards see the text with it.
    regex, json_schema: every completion matches it, unless it is cut off at `max_completion_tokens` (engine=vllm, one
        of them). The trainer scores without that constraint, so `algorithm/correction` has to make up for it.
    max_reward_errors: the run stops when a larger share of a step's samples could not be scored.
    max_prob_error: the run stops, without that step, when `token_mult_prob_error` is above this: the engine's tokens or
        weights are then not what it says (null: never; not looked at with `regex` or `json_schema`, nor in a step with
        completions of older weights).
    max_staleness: completions may be sampled with weights that are so many versions old, while a step trains.
    in_flight: weights change under running requests instead of waiting for them (with max_staleness above 0).
    """

    prompts_per_step: int = 16
    group_size: int = 8
    max_prompt_tokens: int = 512
    long_prompts: str = "drop"
    max_completion_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[Escaped] = dataclasses.field(default_factory=list)
    regex: str | None = None
    json_schema: Any = None
    max_reward_errors: float = 0.1
    max_prob_error: float | None = 10.0
    max_staleness: int = 0
    in_flight: bool = False

    def __post_init__(self) -> None:
        require(self, "prompts_per_step", self.prompts_per_step >= 1, "must be at least 1")
        require(self, "group_size", self.group_size >= 2, "a group is compared with itself: it needs at least 2")
        problem = f"a step of more than {MOST_COMPLETIONS:,} completions fits in no memory"
        require(self, "prompts_per_step", self.prompts_per_step * self.group_size <= MOST_COMPLETIONS, problem)
        require(self, "max_prompt_tokens", self.max_prompt_tokens >= 1, "must be at least 1")
        require(self, "max_completion_tokens", self.max_completion_tokens >= 1, "must be at least 1")
        one_of(self, "long_prompts", ("drop", "truncate"))
        require(
            self,
            "temperature",
            1e-3 <= self.temperature < math.inf,
            "must be above 0 (at least 0.001) and finite: groups of greedy completions are all equal",
        )
        require(self, "top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        require(self, "top_k", self.top_k >= 0, "must be 0 (off) or more")
        require(self, "min_p", 0 <= self.min_p < 1, "must be at least 0 and below 1")
        require(
            self,
            "repetition_penalty",
            0 < self.repetition_penalty < math.inf,
            "must be above 0 and finite (1: no penalty)",
        )
        require(self, "stop", all(self.stop), "a stop string must not be empty")
        self._check_structure()
        require(self, "max_staleness", self.max_staleness >= 0, "must be 0 (exactly on-policy) or more")
        bound = self.max_prob_error
        require(self, "max_prob_error", bound is None or bound > 1, "must be above 1 (where both agree), or null")
        require(self, "max_reward_errors", 0 <= self.max_reward_errors <= 1, "must be between 0 and 1")

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt and a completion, at most."""
        return self.max_prompt_tokens + self.max_completion_tokens

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_completion_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop),
            regex=self.regex,
            json_schema=self.json_schema,
        )

    def _check_structure(self) -> None:
        """What can be known without vLLM, whose own grammar is asked when the engine is connected."""
        schema = self.json_schema
        require(self, "json_schema", schema is None or isinstance(schema, dict), "must be a JSON schema: an object")
        require(self, "json_schema", schema is None or self.regex is None, "choose this or rollout.regex, not both")
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise ConfigError(f"does not compile: {error}", key="rollout.regex", value=self.regex) from error


@section("checkpoint")
class Checkpoint:
    """every: steps between checkpoints (0: only at the end). keep: how many are kept (0: all)."""

    every: int = 20
    keep: int = 2

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be 0 (only at the end) or more")
        require(self, "keep", self.keep >= 0, "must be 0 (keep all) or more")


@section("eval")
class Eval:
    """Accuracy on held-out problems, at temperature 1 (mean over `samples` completions) and greedy.

    every: steps between evaluations (0: only before and after). problems: how many are used (0: none at all;
    null: 256 on a GPU, 32 on a CPU).
    reward: which reward judges them (null: the first). A completion is right where it scores 1 or more.
    """

    every: int = 0
    problems: int | None = None
    samples: int = 4
    reward: str | None = None

    def __post_init__(self) -> None:
        require(self, "every", self.every >= 0, "must be 0 (only before and after) or more")
        require(self, "problems", (self.problems or 0) >= 0, "must be 0 (no evaluation) or more")
        require(self, "samples", self.samples >= 1, "must be at least 1")

    def n_problems(self, cpu: bool) -> int:
        """How many problems are used. cpu: whether the model computes on one."""
        return self.problems if self.problems is not None else 32 if cpu else 256


@part("", "run_schema")
class Run:
    """A whole run. `algorithm` ... `tracker` are config groups; the rest are sections.

    resume_fallback: where a resume finds the newest checkpoint damaged, go on from the newest one that is whole.
    overrides: the command line that composed this config; grpocli fills it in, for `resume=`.
    """

    algorithm: Any
    reward: dict[str, Any]
    task: Any
    model: Any
    engine: Any
    sync: Any
    hardware: Any
    optim: Any
    tracker: Any
    train: Train = Train()
    rollout: Rollouts = Rollouts()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    seed: int = 0
    resume: str | None = None
    resume_fallback: bool = False
    overrides: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        require(self, "seed", self.seed >= 0, "must be 0 or more")
