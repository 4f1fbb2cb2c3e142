"""The records of a step: Prompt -> Completion -> Rollout -> Group -> Row, ragged until a micro-batch is built."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Message: TypeAlias = dict[str, Any]  # `role` and `content`, and for tools `tool_calls` or `name`
Text: TypeAlias = str | list[Message]  # plain text, or a conversation
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a model's computations."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One drawn example of a task.

    uid: identifies the draw; two draws of one question, and two equal questions, have different uids.
    token_ids: the engine's input.
    text: the prompt as rewards get it, a string or a list of messages.
    columns: every other column of the example, such as the answer, and `task_name`.
    row: the number of the example in its task's data, from 0; None if it is unknown.
    target_ids: the tokens of its answer, which supervised training teaches; None otherwise.
    """

    uid: str
    token_ids: list[int]
    text: Text
    columns: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    target_ids: list[int] | None = None

    @property
    def loss_multiplier(self) -> float:
        """The factor on the advantages of its completions."""
        return float(self.columns.get("loss_multiplier", 1.0))

    @property
    def task(self) -> str:
        """The name of its task."""
        return str(self.columns.get("task_name", ""))


@dataclass(frozen=True, slots=True)
class Episode:
    """A conversation of the model with an environment.

    messages: the turns of the model and of the environment, in order.
    turns: the number of the model's turns.
    rewards: the environment's, by name, summed over the turns.
    problem: why the environment could not continue, a phrase for the user.
    calls, failures: the numbers of calls of tools, and of those that failed, by the tool's name; None without tools.
    """

    messages: list[Message]
    turns: int
    rewards: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    calls: dict[str, int] | None = None
    failures: dict[str, int] | None = None

    @property
    def last(self) -> str:
        """The text of the model's last turn."""
        return [str(message["content"]) for message in self.messages if message["role"] == "assistant"][-1]


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that an engine sampled for a prompt.

    logprobs: per token, in nats, under the distribution that was sampled from (after temperature and truncation).
    finish_reason: "stop" (the model ended) or "length" (it was cut at `max_tokens`).
    version: the weight version that sampled it, the oldest if the weights changed while it was sampled.
    mask: 1 for tokens of the model, 0 for the environment's tokens, whose log-prob is 0; None: all 1.
    spans: (version, number of tokens) of each piece in order, if the weights changed; else None.
    episode: the conversation with the task's environment; None without an environment.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int
    mask: list[int] | None = None
    spans: list[tuple[int, int]] | None = None
    episode: Episode | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    def loss_mask(self, mask_truncated: bool) -> list[int]:
        """1 for tokens in the loss. mask_truncated: whether a truncated completion has none."""
        n = len(self.token_ids)
        return [0] * n if mask_truncated and self.truncated else (self.mask or [1] * n)

    @property
    def written(self) -> int:
        """The number of tokens that the model wrote."""
        return len(self.token_ids) if self.mask is None else sum(self.mask)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its decoded text and its rewards by name; NaN: the reward does not apply."""

    prompt: Prompt
    completion: Completion
    text: str
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The G rollouts of one prompt."""

    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def uid(self) -> str:
        return self.prompt.uid


class Status(StrEnum):
    """Whether a step trained on a completion, or why not."""

    TRAINED = "trained"
    """In the loss, with a gradient."""
    ZERO_ADVANTAGE = "zero_advantage"
    """In the denominators of the loss only: its advantage is 0, and no other term has a gradient."""
    MASKED = "masked"
    """No token is in the loss (algorithm.keep.mask_truncated)."""
    FILTERED = "filtered"
    """algorithm.keep dropped its group: all completions scored the same."""
    SURPLUS = "surplus"
    """Its group was kept, but the step had enough groups."""
    LEFTOVER = "carried"
    """As surplus, but the next step trains on it (algorithm.keep.surplus=carry)."""
    EVALUATED = "evaluated"
    """Sampled to evaluate a model, not for training."""


@dataclass(slots=True)
class Row:
    """One completion to train on. Log-probs and entropies are per completion token, in nats, without gradient.

    mask: 1 for tokens in the loss.
    group: the number of its group in the step.
    rollout_logp: under the policy that sampled, computed by the sampler.
    old_logp: under the old policy, if that is the one that sampled; None: the policy before the row's first update.
    logp, entropy: under the policy at the start of the step; None until they are gathered, and in rows whose first
        forward comes after an update (`algorithm/correction=sampler` and supervised training with several minibatches).
    ratio: π_θ / π_old in the last update; None while every update was the first after sampling, where it is 1.
    clipped: 1 for tokens that the objective clipped in an update; None as `ratio`.
    task: the name of its prompt's task.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    advantage: float
    group: int
    rollout_logp: list[float]
    old_logp: list[float] | None = None
    logp: NDArray[np.float32] | None = None
    entropy: NDArray[np.float32] | None = None
    ratio: NDArray[np.float32] | None = None
    clipped: NDArray[np.float32] | None = None
    task: str = ""

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @classmethod
    def of(
        cls, rollout: Rollout, advantage: float, group: int, mask_truncated: bool = False, old_is_sampler: bool = False
    ) -> Row:
        """The row of a rollout. old_is_sampler: whether the policy that sampled is the old policy of the ratio."""
        done = rollout.completion
        ids, task = rollout.prompt.token_ids, rollout.prompt.task
        mask, old_logp = done.loss_mask(mask_truncated), done.logprobs if old_is_sampler else None
        return cls(ids, done.token_ids, mask, advantage, group, done.logprobs, old_logp, task=task)

    @classmethod
    def empty(cls) -> Row:
        """A row without effect, for a process without rows that must make the same collective calls as the others."""
        return cls([0], [0], [0], 0.0, -1, [0.0])


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that completions are sampled from; the trainer computes log-probs under the same one.

    Applied in this order: repetition penalty, temperature, min_p, top_k (0: all), top_p. temperature 0 is greedy.
    stop: strings; a completion ends with the first token whose text completes one, and keeps that token.
    regex, json_schema: the whole completion must match (vLLM only; at most one of them). The sampler masks other
    tokens; the trainer's log-probs ignore this mask.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def structure(self) -> str:
        """The field that constrains completions: "regex", "json_schema", or "" for none."""
        if self.regex is not None:
            return "regex"
        return "json_schema" if self.json_schema is not None else ""


@dataclass(slots=True, eq=False)
class ReusableKV:
    """An engine's KV cache of one completion that a later request may continue.

    state: in the engine's own format. None until an engine stores it, and after the next request has used it; the
    caller sets it to None when no request follows.
    """

    state: Any = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request for n completions of one prompt; the same seed and weights give the same tokens.

    max_tokens: a lower limit than the sampling's. stop: strings in addition to the sampling's.
    prompt: for an engine that does not sample; in later turns of an episode its text is the conversation so far.
    reusable_kv: one for each completion, if a later request may continue it. That request's tokens begin with this
        prompt and the completion, and its only `reusable_kv` is the same object. Engines may ignore them.
    """

    token_ids: list[int]
    n: int
    seed: int
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reusable_kv: tuple[ReusableKV, ...] = ()
    prompt: Prompt | None = None

    def under(self, sampling: Sampling) -> Sampling:
        """The sampling parameters of this request."""
        if self.max_tokens is None and not self.stop:
            return sampling
        limit = min(sampling.max_tokens, self.max_tokens or sampling.max_tokens)
        return replace(sampling, max_tokens=limit, stop=(*sampling.stop, *self.stop))
