"""What flows through a step: Prompt -> Completion -> Rollout -> Group, ragged until a micro-batch is built."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Message: TypeAlias = dict[str, str]
Text: TypeAlias = str | list[Message]  # plain text, or a conversation


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question as it was drawn.

    uid: names this draw; two draws of the same question, or two equal questions, have different uids.
    token_ids: what the engine is given.
    text: the prompt as a reward function sees it, a string or a list of messages.
    columns: every other column of the example (the answer ...), and `task_name`.
    """

    uid: str
    token_ids: list[int]
    text: Text
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def loss_multiplier(self) -> float:
        """What the advantages of its completions are multiplied by."""
        return float(self.columns.get("loss_multiplier", 1.0))

    @property
    def task(self) -> str:
        """The name of the task that it is of."""
        return str(self.columns.get("task_name", ""))


@dataclass(frozen=True, slots=True)
class Episode:
    """messages: the model's turns and the environment's, in order. turns: how many were the model's.

    rewards: by name, summed over the turns. problem: why the environment could not go on, a phrase for the user.
    """

    messages: list[Message]
    turns: int
    rewards: dict[str, float] = field(default_factory=dict)
    problem: str | None = None

    @property
    def last(self) -> str:
        """The text of the model's last turn."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"][-1]


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for a prompt.

    logprobs: per token, in nats, of the distribution that was sampled from (after temperature and truncation).
    finish_reason: "stop" (the model ended) or "length" (it was cut at `max_tokens`).
    version: the weight version that sampled it, the oldest where weights changed on the way; then spans are the pieces
        in order, as (version, number of tokens).
    mask: 1 where the model wrote the token, 0 where it was given (an environment's words between turns);
        None means all 1. Given tokens have a log-prob of 0.
    episode: what came of it in its environment; None where the task has none.
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

    @property
    def written(self) -> int:
        """How many tokens are the model's own."""
        return len(self.token_ids) if self.mask is None else sum(self.mask)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its decoded text and its rewards by name; NaN means "does not apply"."""

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
    """What became of a completion in a step: trained on, or why not."""

    TRAINED = "trained"
    """It is in the loss, with a gradient."""
    ZERO_ADVANTAGE = "zero_advantage"
    """It counts in the loss's denominators, but its advantage is 0 and no other term has a gradient."""
    MASKED = "masked"
    """No token of it is in the loss, as with algorithm.keep.mask_truncated."""
    FILTERED = "filtered"
    """algorithm.keep left its group out: all of it scored the same."""
    SURPLUS = "surplus"
    """Its group was kept, but the step had enough of them."""
    CARRIED = "carried"
    """As surplus, and the next step trains on it (algorithm.keep.surplus=carry)."""
    STALE = "stale"
    """Its weights were older than rollout.max_staleness allows."""
    EVALUATED = "evaluated"
    """It was sampled to evaluate a model, not to train on."""


@dataclass(slots=True)
class Row:
    """One completion to train on. Log-probs and entropies are per completion token, in nats, without gradient.

    group: which group of the step it belongs to. mask: 1 for tokens in the loss. old_logp: None while the policy is
    still the one whose log-probs they are. selected: tokens of the policy-gradient term (None: all).
    logp, entropy: under the policy that begins the step; None until they are computed.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    advantage: float
    group: int
    rollout_logp: list[float]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None
    selected: Tensor | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @classmethod
    def of(
        cls, rollout: Rollout, advantage: float, group: int, mask_truncated: bool, version: int, corrected: bool = False
    ) -> Row:
        """A row of a step that trains weight version `version`; what an older one sampled is off-policy.

        Its old log-probs are then the sampler's, unless the algorithm corrects for the sampler (`corrected`): the
        correction is from the sampler to the step's start, and the objective's ratio from there on.
        """
        import torch

        done = rollout.completion
        n = len(done.token_ids)
        mask = [0] * n if mask_truncated and done.truncated else (done.mask or [1] * n)
        old_logp = torch.tensor(done.logprobs) if done.version < version and not corrected else None
        return cls(rollout.prompt.token_ids, done.token_ids, mask, advantage, group, done.logprobs, old_logp)

    @classmethod
    def empty(cls) -> Row:
        """Adds nothing: keeps a process that has run out of rows in step with the others' collective calls."""
        return cls([0], [0], [0], 0.0, -1, [0.0])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn; the trainer scores them under the same distribution.

    Order: the repetition penalty, then logits / temperature, then min_p, then top_k (0 keeps all), then top_p.
    temperature 0 is greedy.
    stop: strings; a completion ends with the first token whose text completes one, and keeps that token.
    regex, json_schema: the whole completion must match, by a mask on its tokens (vLLM alone; at most one of them).
        The trainer scores without that mask.
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
        """The name of the field that gives completions a form: "regex", "json_schema", or "" for none."""
        if self.regex is not None:
            return "regex"
        return "json_schema" if self.json_schema is not None else ""


@dataclass(slots=True, eq=False)
class Past:
    """Of one completion that may go on: `held` is what an engine has computed of it, in the engine's own form.

    Empty (None) until an engine puts something there, and when one has used it. Who asks no further empties it.
    """

    held: Any = None


@dataclass(frozen=True, slots=True)
class Request:
    """n completions of one prompt; the same seed and weights give the same tokens.

    max_tokens: a limit of its own, below the sampling's. stop: strings beside the sampling's.
    prompt: for an engine that does not sample; of an episode's later turn its text is the conversation so far.
    pasts: one for each completion, where another request may go on from it, whose tokens then begin with this one's
        and all of the completion's, and whose only past is the same. An engine need not use them.
    """

    token_ids: list[int]
    n: int
    seed: int
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    pasts: tuple[Past, ...] = ()
    prompt: Prompt | None = None

    def under(self, sampling: Sampling) -> Sampling:
        """How its completions are drawn."""
        if self.max_tokens is None and not self.stop:
            return sampling
        limit = min(sampling.max_tokens, self.max_tokens or sampling.max_tokens)
        return replace(sampling, max_tokens=limit, stop=(*sampling.stop, *self.stop))
