"""Multi-turn completions: the sampled tokens of the model, with the environment's messages between them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from grpocli.environments.environment import TOOLS, WORKER
from grpocli.environments.tools import (
    NO_CALLS_LEFT,
    UNKNOWN,
    answer_to,
    call_in_worker,
    calls_in,
    name_of,
    refusal,
    tools_of,
)
from grpocli.errors import ConfigError
from grpocli.processes.threads import run_in_thread
from grpocli.rewards.reward import Failure
from grpocli.rewards.worker_pool import WorkerPool, default_workers
from grpocli.rollout.engine import Listener, OnGroup, ignore_group
from grpocli.rollout.sampling import derive_seed
from grpocli.rollout.turns import CallParser, TurnEncoder
from grpocli.types import Completion, Episode, Message, Prompt, Request, ReusableKV, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.environments.environment import EnvironmentConfig


@lru_cache(maxsize=8)
def _pools(workers: int, timeout: float, variables: tuple[str, ...], stateful: bool) -> tuple[WorkerPool, ...]:
    """The pools of an environment: one of all workers, or for a stateful one a pool for each worker."""
    sizes = [1] * workers if stateful else [workers]
    return tuple(WorkerPool(WORKER, size, timeout, variables) for size in sizes)


def _pools_of(environment: EnvironmentConfig) -> tuple[WorkerPool, ...]:
    workers = environment.workers or default_workers()
    return _pools(workers, environment.timeout, tuple(environment.env), environment.stateful)


@lru_cache(maxsize=16)
def _parser_of(tokenizer: PreTrainedTokenizerBase, tools: str) -> CallParser:
    """Finds calls in the turns of a model; its `encoder` encodes the answers."""
    return CallParser(TurnEncoder(tokenizer, json.loads(tools)))


@dataclass(slots=True, eq=False)
class _RunningEpisode:
    """An unfinished episode, the i-th completion of the k-th request."""

    k: int
    i: int
    prompt: Prompt
    request: Request
    environment: EnvironmentConfig
    reusable: ReusableKV
    number: int
    """Of all episodes, by the draw of its prompt; chooses the worker of a stateful environment."""
    state: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"
    done: bool = False
    problem: str | None = None
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def runs_tools(self) -> bool:
        """Whether its calls are run here; otherwise an environment answers its turns."""
        return self.environment.name == TOOLS

    @property
    def has_tools(self) -> bool:
        """Whether prompts show tools, here or of an environment."""
        return bool(tools_of(self.environment))

    @property
    def pool(self) -> WorkerPool:
        """The pool that computes all steps of this episode."""
        pools = _pools_of(self.environment)
        return pools[self.number % len(pools)]

    def add_rewards(self, rewards: Mapping[str, float]) -> None:
        for name, value in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value

    @property
    def conversation(self) -> list[Message]:
        """The prompt's messages, then those of this episode."""
        text = self.prompt.text
        return [*([{"role": "user", "content": text}] if isinstance(text, str) else text), *self.messages]

    def add_turn(self, turn: Completion, message: Message) -> None:
        """Append a turn of the model."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.mask += [1] * len(turn.token_ids)
        self.spans += turn.spans or [(turn.version, len(turn.token_ids))]
        self.messages.append(message)
        self.finish_reason = turn.finish_reason
        self.turns += 1

    def add_observation(self, ids: Sequence[int], observation: Sequence[Message]) -> None:
        """Append the environment's messages, which have mask 0 and log-prob 0."""
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.spans.append((self.spans[-1][0], len(ids)))
        self.messages += observation

    def count_calls(self, answers: Sequence[Message]) -> None:
        for answer in answers:
            if answer["role"] == "tool":
                name = answer.get("name", UNKNOWN)
                self.calls[name] += 1
                self.failures[name] += "is_error" in answer

    @property
    def tool_specs(self) -> dict[str, str]:
        """The tools as `task.tools` names them, by their names."""
        return dict(zip(map(name_of, tools_of(self.environment)), self.environment.arguments["tools"], strict=True))

    def checked_calls(self) -> list[tuple[dict[str, Any], str]]:
        """The calls of the last turn, each with the reason why it is not run."""
        left = self.environment.arguments["max_calls"] - self.calls.total()
        return [
            (call, refusal(call, self.tool_specs) or ("" if number < left else NO_CALLS_LEFT))
            for number, call in enumerate(calls_in(self.messages[-1]))
        ]

    def completion(self) -> Completion:
        runs = groupby(self.spans, key=itemgetter(0))
        spans = [(version, sum(tokens for _, tokens in run)) for version, run in runs]
        counts = (dict(self.calls), dict(self.failures)) if self.has_tools else (None, None)
        return Completion(
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            version=min(version for version, _ in spans),
            mask=self.mask,
            spans=spans if len(spans) > 1 else None,
            episode=Episode(self.messages, self.turns, self.rewards, self.problem, *counts),
        )


@dataclass(frozen=True, slots=True)
class MultiTurnEngine:
    """Wraps an engine; runs multi-turn episodes for the tasks in `environments`."""

    complete: Callable[[Sequence[Request], Sampling, OnGroup], list[list[Completion]]]
    """`Engine.generate` or `Engine.sample`."""
    tokenizer: PreTrainedTokenizerBase
    environments: Mapping[str, EnvironmentConfig]
    in_any_process: Callable[[bool], bool]
    """Whether a flag is set in any of the processes that call `generate` together."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: Sampling,
        on_group: OnGroup = ignore_group,
    ) -> list[list[Completion]]:
        """`n` completions for each request, in the requests' order. Collective if `complete` is.

        on_group: see `Engine.generate`.
        """
        pairs = list(zip(prompts, requests, strict=True))
        first = [_turn_request(request, self.environments.get(prompt.task)) for prompt, request in pairs]
        listener = Listener.wrap(on_group)
        watch = listener.watch

        def on_first_turn(k: int, group: list[Completion]) -> None:
            if prompts[k].task not in self.environments:
                listener(k, group)

        completions = self.complete(first, sampling, Listener(on_first_turn, watch))
        if not self.environments:
            return completions
        running = [] if watch.cancelled() else self._start_episodes(prompts, requests, first)
        episodes = list(running)
        # an episode runs only if generation was not cancelled, so its first turn is complete
        turns = [completions[episode.k][episode.i] for episode in running]
        while True:
            running = [] if watch.cancelled() else self._step(running, turns, sampling)
            if not self.in_any_process(bool(running)):
                break
            asked = [self._next_request(episode, sampling) for episode in running]
            turn_listener = Listener(watch=watch.part(len(episodes) - len(running), len(episodes)))
            turns = [group[0] for group in self.complete(asked, sampling, turn_listener) if group]
        for episode in episodes:
            if episode.spans:  # otherwise it was cancelled before its first turn
                completions[episode.k][episode.i] = episode.completion()
        return completions

    def _start_episodes(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], first: Sequence[Request]
    ) -> list[_RunningEpisode]:
        """The episodes of the prompts that have an environment, reset. first: the requests of their first turns."""
        started = [
            _RunningEpisode(k, i, prompt, request, self.environments[prompt.task], kv, draw * request.n + i)
            for k, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
            for draw in [int(prompt.uid.rpartition("-")[2])]
            if prompt.task in self.environments
            for i, kv in enumerate(first[k].reusable_kv or [ReusableKV()] * request.n)
        ]
        for episode, answer in self._call_environments(started, "reset").items():
            if isinstance(answer, Failure):
                episode.problem = f"the environment's reset failed: {answer.reason}"
            else:
                (episode.state,) = answer
        return started

    def check(self) -> None:
        """Raise ConfigError unless calls can be found in the turns of a model that has tools."""
        for environment in self.environments.values():
            if tools_of(environment):
                _ = self._parser(environment).template

    def _step(
        self, running: Sequence[_RunningEpisode], turns: Sequence[Completion], sampling: Sampling
    ) -> list[_RunningEpisode]:
        """Pass each turn to its environment; return the episodes that continue."""
        for episode, turn in zip(running, turns, strict=True):
            episode.add_turn(turn, self._message(episode, turn))
        acting = [episode for episode in running if episode.problem is None]
        callers = [episode for episode in acting if episode.runs_tools]
        answers = self._call_environments(acting, "step") | self._call_tools(callers)
        continuing = [episode for episode in acting if self._apply_step(episode, answers[episode], sampling)]
        kept = set(continuing)
        ended = [episode for episode in running if episode not in kept]
        for episode in ended:
            episode.reusable.state = None
        # the environments of episodes that a limit ended, or an observation that cannot be tokenised, are told
        answered = [episode for episode in ended if not isinstance(answers.get(episode, Failure("")), Failure)]
        limited = [episode for episode in answered if not episode.done]
        for episode, answer in self._call_environments(limited, "finish").items():
            if isinstance(answer, Failure):
                episode.problem = episode.problem or f"the environment's finish failed: {answer.reason}"
            else:
                episode.add_rewards(*answer)
        return continuing

    def _message(self, episode: _RunningEpisode, turn: Completion) -> Message:
        if episode.has_tools:
            return self._parser(episode.environment).message(turn.token_ids)
        return {"role": "assistant", "content": str(self.tokenizer.decode(turn.token_ids, skip_special_tokens=True))}

    def _call_tools(self, episodes: Sequence[_RunningEpisode]) -> dict[_RunningEpisode, Any]:
        """Run the calls in the last turn of each episode; return the answers as steps of an environment."""
        observations: dict[_RunningEpisode, list[Message]] = {episode: [] for episode in episodes}
        runs, items = [], []
        for episode in episodes:
            specs = episode.tool_specs
            for number, (call, problem) in enumerate(episode.checked_calls()):
                answer = answer_to(call, specs, problem, failed=bool(problem))
                observations[episode].append(answer)
                if not problem:
                    seed = derive_seed(episode.request.seed, episode.i, episode.turns, number)
                    items.append(["tool", specs[call["name"]], call["arguments"], seed])
                    runs.append((episode, answer))
        results = self._call_workers([episode for episode, _ in runs], items)
        for (_, answer), result in zip(runs, results, strict=True):
            failed = isinstance(result, Failure)
            answer |= {"content": f"error: {result.reason}", "is_error": True} if failed else {"content": result[0]}
        for episode, answers in observations.items():
            encoder, longest = self._parser(episode.environment).encoder, episode.environment.arguments["max_tokens"]
            for answer in answers:
                answer["content"] = encoder.cut(str(answer["content"]), longest)
        return {episode: [answers, {}, not answers, {}] for episode, answers in observations.items()}

    def _apply_step(self, episode: _RunningEpisode, answer: Any, sampling: Sampling) -> bool:
        """Apply an environment's answer to the episode; return whether the episode continues."""
        if isinstance(answer, Failure):
            episode.problem = f"the environment's turn {episode.turns} failed: {answer.reason}"
            return False
        observation, rewards, episode.done, episode.state = answer
        episode.add_rewards(rewards)
        if episode.has_tools:
            episode.count_calls(observation)
        if episode.done:
            if not episode.runs_tools and len(episode.token_ids) < sampling.max_tokens:
                episode.finish_reason = "stop"  # by the environment, also where the limit of a turn cut its last turn
            return False
        try:
            ids = self._parser(episode.environment).encoder.encode_observation(
                episode.token_ids, observation, not isinstance(episode.prompt.text, str)
            )
        except ConfigError as error:
            episode.problem = f"the environment's turn {episode.turns} failed: {error}"
            return False
        if episode.turns == episode.environment.turns or len(episode.token_ids) + len(ids) >= sampling.max_tokens:
            episode.finish_reason = "length"
            return False
        episode.add_observation(ids, observation)
        return True

    def _next_request(self, episode: _RunningEpisode, sampling: Sampling) -> Request:
        room = sampling.max_tokens - len(episode.token_ids)
        seed = derive_seed(episode.request.seed, episode.i, episode.turns)
        prompt = replace(episode.prompt, text=episode.conversation)
        request = Request([*episode.request.token_ids, *episode.token_ids], 1, seed, prompt=prompt)
        limit = min(room, episode.environment.turn_tokens or room)
        turn = _turn_request(request, episode.environment)
        return replace(turn, max_tokens=limit, reusable_kv=(episode.reusable,))

    def _call_environments(self, running: Sequence[_RunningEpisode], method: str) -> dict[_RunningEpisode, Any]:
        """Call a method of the environments of those episodes that have one; return the results."""
        running = [episode for episode in running if not episode.runs_tools]
        items = []
        for episode in running:
            given = [_as_json(episode.prompt.columns)] if method == "reset" else [episode.conversation, episode.state]
            items.append([method, episode.environment.name, json.dumps(episode.environment.arguments), *given])
        return dict(zip(running, self._call_workers(running, items), strict=True))

    def _call_workers(self, running: Sequence[_RunningEpisode], items: Sequence[Any]) -> list[Any]:
        """The results of one item for each episode, from the workers of its environment, concurrently."""
        own: dict[WorkerPool, list[int]] = {}
        for i, episode in enumerate(running):
            own.setdefault(episode.pool, []).append(i)
        found = [
            run_in_thread(partial(pool.map, [items[i] for i in numbers]), "environments")
            for pool, numbers in own.items()
        ]
        answers: dict[int, Any] = {}
        for numbers, results in zip(own.values(), found, strict=True):
            answers |= zip(numbers, results.result(), strict=True)
        return [answers[i] for i in range(len(running))]

    def _parser(self, environment: EnvironmentConfig) -> CallParser:
        return _parser_of(self.tokenizer, json.dumps(tools_of(environment)))

    def close(self) -> None:
        """End the worker processes."""
        for environment in self.environments.values():
            for pool in _pools_of(environment):
                pool.close()


def check_environment(task: str, environment: EnvironmentConfig, example: Mapping[str, Any]) -> None:
    """Check that an episode can start from the example, before any model is downloaded. Raises ConfigError.

    The environment runs in a worker process, as in training, so this process does not import its modules.
    """
    environment.check_variables()
    if environment.name == TOOLS:
        tools_of(environment)
        return
    given = {name: value for name, value in example.items() if name != "prompt"} | {"task_name": task}
    item = ["reset", environment.name, json.dumps(environment.arguments), _as_json(given)]
    name = str(environment.name)
    call_in_worker(WORKER, item, environment.timeout, environment.env, "task.environment.name", name)


def _turn_request(request: Request, environment: EnvironmentConfig | None) -> Request:
    """The request with the limits of a turn, and a reusable KV cache if another turn may follow."""
    if environment is None:
        return request
    reusable_kv = tuple(ReusableKV() for _ in range(request.n)) if environment.turns > 1 else ()
    return replace(request, max_tokens=environment.turn_tokens, stop=tuple(environment.stop), reusable_kv=reusable_kv)


def _as_json(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a prompt as JSON types, for a worker process."""
    return dict(json.loads(json.dumps(dict(columns), default=str)))
