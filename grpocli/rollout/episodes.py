"""Completions of several turns: the model's tokens as they were sampled, and an environment's words between them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli.rewards.reward import Failure
from grpocli.rewards.worker_pool import WorkerPool, default_workers
from grpocli.rollout.engine import Listener, OnGroup, ignore
from grpocli.rollout.sampling import seed_of
from grpocli.types import Completion, Episode, Message, Past, Prompt, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.distributed.world import World
    from grpocli.environments.environment import EnvironmentConfig
    from grpocli.rollout.engine import Engine


@lru_cache(maxsize=8)
def _pool(workers: int, timeout: float, variables: tuple[str, ...]) -> WorkerPool:
    return WorkerPool("grpocli.environments.worker:call", workers or default_workers(), timeout, variables)


def _pool_of(environment: EnvironmentConfig) -> WorkerPool:
    return _pool(environment.workers, environment.timeout, tuple(environment.env))


@dataclass(slots=True, eq=False)
class _Live:
    """An episode that goes on. k, i: the i-th completion of the k-th request."""

    k: int
    i: int
    prompt: Prompt
    request: Request
    environment: EnvironmentConfig
    past: Past
    state: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"
    problem: str | None = None
    turns: int = 0

    @property
    def said(self) -> list[Message]:
        """The prompt's messages and this episode's."""
        text = self.prompt.text
        return [*([{"role": "user", "content": text}] if isinstance(text, str) else text), *self.messages]

    def spoke(self, turn: Completion, text: str) -> None:
        """The model's turn."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.mask += [1] * len(turn.token_ids)
        self.spans += turn.spans or [(turn.version, len(turn.token_ids))]
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reason = turn.finish_reason
        self.turns += 1

    def heard(self, ids: Sequence[int], observation: Sequence[Message]) -> None:
        """The environment's words."""
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.spans.append((self.spans[-1][0], len(ids)))
        self.messages += observation

    def completion(self) -> Completion:
        spans = _merged(self.spans)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            version=min(version for version, _ in spans),
            mask=self.mask,
            spans=spans if len(spans) > 1 else None,
            episode=Episode(self.messages, self.turns, self.rewards, self.problem),
        )


@dataclass(frozen=True, slots=True)
class Episodes:
    """An engine whose completions may have several turns: those of tasks that have an environment (`environments`)."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    environments: Mapping[str, EnvironmentConfig]
    world: World

    def generate(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order. on_group: as an engine's. Collective."""
        first = [
            _first(request, self.environments.get(prompt.task))
            for prompt, request in zip(prompts, requests, strict=True)
        ]

        listener = Listener.wrap(on_group)
        watch = listener.watch

        def over(k: int, completions: list[Completion]) -> None:
            if prompts[k].task not in self.environments:
                listener(k, completions)

        found = self.engine.generate(first, sampling, Listener(over, watch))
        if not self.environments:
            return found
        begun = [] if watch.cancelled() else enumerate(zip(prompts, requests, strict=True))
        live = [
            _Live(k, i, prompt, request, self.environments[prompt.task], past)
            for k, (prompt, request) in begun
            if prompt.task in self.environments
            for i, past in enumerate(first[k].pasts or [Past()] * request.n)
        ]
        everyone = list(live)
        self._reset(live)
        turns = [found[one.k][one.i] for one in live]  # none is missing: it was not cancelled
        while True:
            live = [] if watch.cancelled() else self._after(live, turns, sampling)
            if not self.world.any(bool(live)):
                break
            asked = [self._next(one, sampling) for one in live]
            ended = len(everyone) - len(live)
            counted = Listener(watch=watch.part(ended, len(everyone)))
            turns = [completions[0] for completions in self.engine.generate(asked, sampling, counted) if completions]
        for one in everyone:
            if one.spans:  # else it was cancelled before its first turn was taken
                found[one.k][one.i] = one.completion()
        return found

    def check(self, prompts: Sequence[Prompt]) -> None:
        """That an episode of each can begin. Raises ConfigError."""
        live = [_Live(0, 0, prompt, Request([], 1, 0), self.environments[prompt.task], Past()) for prompt in prompts]
        self._reset(live)
        for one in live:
            if one.problem:
                raise ConfigError(
                    f"{one.prompt.task}: {one.problem}", key="task.environment.name", value=one.environment.name
                )

    def _reset(self, live: Sequence[_Live]) -> None:
        answers = self._ask(live, ["reset"] * len(live), [[_columns(one.prompt)] for one in live])
        for one, answer in zip(live, answers, strict=True):
            if isinstance(answer, Failure):
                one.problem = f"its environment could not be reset: {answer.reason}"
            else:
                (one.state,) = answer

    def _after(self, live: Sequence[_Live], turns: Sequence[Completion], sampling: Sampling) -> list[_Live]:
        """Hand each turn to its environment; the episodes that go on."""
        for one, turn in zip(live, turns, strict=True):
            one.spoke(turn, str(self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)))
        acting = [one for one in live if one.problem is None]
        answers = self._ask(acting, ["step"] * len(acting), [[one.said, one.state] for one in acting])
        on = [one for one, answer in zip(acting, answers, strict=True) if self._goes_on(one, answer, sampling)]
        for one in set(live).difference(on):
            one.past.held = None
        return on

    def _goes_on(self, one: _Live, answer: Any, sampling: Sampling) -> bool:
        if isinstance(answer, Failure):
            one.problem = f"turn {one.turns} of its environment: {answer.reason}"
            return False
        observation, rewards, done, one.state = answer
        for name, value in rewards.items():
            one.rewards[name] = one.rewards.get(name, 0.0) + value
        if done:
            one.finish_reason = "stop" if len(one.token_ids) < sampling.max_tokens else one.finish_reason
            return False
        try:
            ids = Turns(self.tokenizer).after(one.token_ids, observation, not isinstance(one.prompt.text, str))
        except ConfigError as error:
            one.problem = f"turn {one.turns} of its environment: {error}"
            return False
        if one.turns == one.environment.turns or len(one.token_ids) + len(ids) >= sampling.max_tokens:
            one.finish_reason = "length"
            return False
        one.heard(ids, observation)
        return True

    def _next(self, one: _Live, sampling: Sampling) -> Request:
        room = sampling.max_tokens - len(one.token_ids)
        seed = seed_of(one.request.seed, one.i, one.turns)
        prompt = replace(one.prompt, text=one.said)
        request = _first(Request([*one.request.token_ids, *one.token_ids], 1, seed, prompt=prompt), one.environment)
        return replace(request, max_tokens=min(room, one.environment.turn_tokens or room), pasts=(one.past,))

    def _ask(self, live: Sequence[_Live], kinds: Sequence[str], given: Sequence[Sequence[Any]]) -> list[Any]:
        """All of them side by side, in the worker processes."""
        answers: list[Any] = [None] * len(live)
        for pool in dict.fromkeys(_pool_of(one.environment) for one in live):
            own = [i for i, one in enumerate(live) if _pool_of(one.environment) is pool]
            items = [
                [kinds[i], live[i].environment.name, json.dumps(live[i].environment.arguments), *given[i]] for i in own
            ]
            for i, answer in zip(own, pool.map(items), strict=True):
                answers[i] = answer
        return answers

    def close(self) -> None:
        """End the worker processes."""
        for environment in self.environments.values():
            _pool_of(environment).close()


def check_environment(task: str, environment: EnvironmentConfig, example: Mapping[str, Any]) -> None:
    """Check, before a model is fetched, that an episode of the example can begin. Raises ConfigError.

    The environment runs in a worker process, as always: it may import what this process should not have.
    """
    if missing := [name for name in environment.env if name not in os.environ]:
        raise ConfigError(
            "is not set here; set it, or leave it out", key="task.environment.env", value=f"[{missing[0]}]"
        )
    given = {name: value for name, value in example.items() if name != "prompt"} | {"task_name": task}
    columns = json.loads(json.dumps(given, default=str))
    pool = WorkerPool("grpocli.environments.worker:call", 1, environment.timeout, environment.env)
    try:
        (answer,) = pool.map([["reset", environment.name, json.dumps(environment.arguments), columns]])
    finally:
        pool.close()
    if isinstance(answer, Failure):
        problem = f"{task}: its environment could not be reset: {answer.reason}"
        raise ConfigError(problem, key="task.environment.name", value=environment.name)


def _first(request: Request, environment: EnvironmentConfig | None) -> Request:
    """With the limits of a turn, and what another turn needs."""
    if environment is None:
        return request
    pasts = tuple(Past() for _ in range(request.n)) if environment.turns > 1 else ()
    return replace(request, max_tokens=environment.turn_tokens, stop=tuple(environment.stop), pasts=pasts)


def _columns(prompt: Prompt) -> dict[str, Any]:
    """What of an example can be sent to a worker process."""
    found: dict[str, Any] = json.loads(json.dumps(prompt.columns, default=str))
    return found


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for version, tokens in spans:
        if made and made[-1][0] == version:
            made[-1] = (version, made[-1][1] + tokens)
        else:
            made.append((version, tokens))
    return made


SPOKEN = "grpocli-turn"
"""Stands for the model's words: these stay the tokens that were sampled, and are never written again."""


class Turns:
    """With the chat template of `tokenizer`, or as plain text where the prompts are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def after(self, sampled: Sequence[int], observation: Sequence[Message], chat: bool) -> list[int]:
        """The tokens from the end of a turn of the model's, `sampled`, to the beginning of its next one.

        The template's end of a turn is left out where the model has sampled it. Raises ConfigError where the template
        cannot show these messages.
        """
        text = self._between(observation) if chat else "".join(message["content"] for message in observation)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False).input_ids
        if chat and ids and sampled and ids[0] == sampled[-1]:
            return ids[1:]
        return ids

    def _between(self, observation: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        spoken: list[Any] = [{"role": "user", "content": "."}, {"role": "assistant", "content": SPOKEN}]
        try:
            text = str(
                self.tokenizer.apply_chat_template([*spoken, *observation], tokenize=False, add_generation_prompt=True)
            )
        except (TemplateError, ValueError) as error:
            raise ConfigError(f"model: its chat template refuses what an environment says: {error}") from error
        _, found, after = text.partition(SPOKEN)  # the first one: an environment may say it too
        if not found:
            raise ConfigError(
                "model: its chat template leaves out what the model has said before an environment's words"
            )
        return after
