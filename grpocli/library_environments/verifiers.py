"""task=verifiers: environments of the library verifiers, played by the trainer's own engine.

The library runs an episode by itself and asks a chat endpoint for the turns of the model. Here the endpoint is a server
in the worker process, on the loopback interface, which hands each request to the trainer and waits for the turn. So
prompts, tools, rewards and stops are the library's, and the tokens and their mask are the trainer's.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import UserCode, part, require
from grpocli.config.user_code import no_such_file, raised, where
from grpocli.environments.environment import STEP_SHARE, EnvironmentConfig, Step
from grpocli.environments.tools import UNKNOWN, Schema, call_in_worker
from grpocli.errors import ConfigError
from grpocli.library_environments.library_task import BackgroundLoop, LibraryTask
from grpocli.library_environments.verifiers_episode import (
    RUNNING,
    Endpoint,
    ModelRequest,
    RunningEpisode,
    load_env,
    messages_of,
    set_up,
    take_over,
)
from grpocli.tasks.task import Example
from grpocli.types import Message, Text

if TYPE_CHECKING:
    import httpx
    from verifiers.v1 import Env, ModelContext, Task, Toolset

HERE = "grpocli.library_environments.verifiers"


@part("task", "verifiers")
class VerifiersTask(LibraryTask):
    """Tasks of an environment of verifiers, which plays and scores its episodes; use `reward=[environment]`."""

    library, needs = "verifiers", "verifiers<0.5"
    environment: EnvironmentConfig = EnvironmentConfig(name=f"{HERE}:Verifiers", stateful=True, turns=32, timeout=60.0)
    env: UserCode = MISSING
    """An installed environment, or the path of its folder or .py file: the module that exports a `Taskset`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the taskset's config: `task.config.split=train`."""
    paired_env: UserCode = ""
    """Name of an environment of verifiers that plays the taskset; empty: the taskset's own."""
    load_timeout: float = 300.0
    """Seconds for loading the tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "env", self.env not in ("", MISSING), "name an environment: task.env=NAME, or its folder")
        require(self, "load_timeout", 0 < self.load_timeout < math.inf, "must be above 0 seconds and finite")
        seconds = STEP_SHARE * self.environment.timeout
        given = {"taskset": self.env, "config": self.config, "env": self.paired_env, "seconds": seconds}
        own = replace(self.environment, name=f"{HERE}:Verifiers", arguments=given)
        object.__setattr__(self, "environment", own)

    def check_ready(self) -> None:
        super().check_ready()
        place = Path(self.env).expanduser()
        is_path = place.suffix == ".py" or self.env.startswith((".", "/", "~"))  # OWNER/NAME is a package
        if is_path and not place.exists():
            raise no_such_file(place, "task.env")

    def examples(self, split: str) -> Sequence[Example]:
        """Examples with `prompt`, the task's own columns, and `index` and `key`, which name the task."""
        rows, _ = self._loaded()
        chosen = self.rows_of(split, len(rows), "task.env", self.env, "give it more tasks by task.config")
        return [{**rows[i], "prompt": self._prompt(rows[i]["prompt"])} for i in chosen]

    def tool_schemas(self) -> list[Schema]:
        """The tools that the tasks give to the model."""
        _, schemas = self._loaded()
        return schemas

    def _loaded(self) -> tuple[list[dict[str, Any]], list[Schema]]:
        config, variables = json.dumps(self.config, sort_keys=True), tuple(self.environment.env)
        return _load(self.env, config, self.paired_env, self.wanted, self.load_timeout, variables)

    def _prompt(self, messages: list[Message]) -> Text:
        if self.format == "chat":
            return messages
        if len(messages) != 1 or messages[0]["role"] != "user":
            problem = "is for a prompt of one user message, but this environment's have more"
            raise ConfigError(problem, key="task.format", value=self.format, hint="use task.format=chat")
        return str(messages[0]["content"])


@lru_cache(maxsize=8)
def _load(
    env: str, config: str, paired: str, n: int, timeout: float, variables: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[Schema]]:
    """The first n tasks, and their tools."""
    given = [env, json.loads(config), paired, STEP_SHARE * timeout, n]
    rows, schemas = call_in_worker(f"{HERE}:load_tasks", given, timeout, variables, "task.env", env, "load it")
    return rows, schemas


class Verifiers:
    """An environment of verifiers.

    taskset: its name; config: keys of the taskset; env: name of a paired environment; seconds: deadline of a step;
    tool_schemas: the tools that the prompts show, None: not known.
    """

    def __init__(
        self,
        taskset: str,
        config: dict[str, Any],
        env: str,
        seconds: float,
        tool_schemas: list[Schema] | None = None,
    ) -> None:
        self._episodes: dict[str, RunningEpisode] = {}
        self._background = BackgroundLoop(seconds)
        self._env: Env[Any] = load_env(taskset, config, env)
        self._shared: list[Toolset[Any, Any]] = take_over(self._env.taskset)
        self._schemas = tool_schemas
        self._tasks: list[Task[Any, Any, Any]] = []
        self._source: Iterator[Task[Any, Any, Any]] = iter(self._env.taskset)
        self._context: ModelContext = self._background.run(self._serve)

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Start the episode of the task with the example's `index`, and run it until it asks for the first turn."""
        task = self._task_at(int(metadata["index"]))
        if task.key != metadata["key"]:
            raise ValueError(f"task {metadata['index']} differs at each load; a taskset must be reproducible")
        name = secrets.token_urlsafe(8)
        with self._ended_by_errors(name):
            self._background.run(lambda: self._start(name, task))
            request = self._episodes[name].pending
            if request and self._schemas is not None and request.tools != self._schemas:
                raise ValueError(f"task {metadata['index']} has other tools than task 0, but prompts show the same")
        return {"episode": name}

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        """Give the episode the model's turn; run it until it asks for the next one, or ends."""
        with self._ended_by_errors(metadata["episode"]):
            episode = self._episode(metadata)
            request = episode.pending
            if request is None:
                self._rewards(metadata)
                raise ValueError("the episode ends without the model's turn")
            _check_unchanged(request.messages, messages[:-1])
            self._answer(episode, messages[-1])
            if episode.pending is None:
                results = [{**one, "content": _text(one)} for one in episode.results.values()]
                return Step(results, self._rewards(metadata), True, metadata)
            asked = episode.pending.messages
            _check_unchanged(asked[: len(messages)], messages)
            return Step([_message(one, episode.results) for one in asked[len(messages) :]], {}, False, metadata)

    def finish(self, messages: list[Message], metadata: dict[str, Any]) -> dict[str, float]:
        """End an episode that has no further turn, as a full context does; returns the library's rewards of it."""
        with self._ended_by_errors(metadata["episode"]):
            episode = self._episode(metadata)
            while episode.pending is not None:
                self._answer(episode, None)
            return self._rewards(metadata)

    def tasks(self, n: int) -> list[Task[Any, Any, Any]]:
        """The first n tasks, fewer if there are not so many."""
        self._tasks += itertools.islice(self._source, max(n - len(self._tasks), 0))
        return self._tasks[:n]

    def opening(self, task: Task[Any, Any, Any]) -> list[Message]:
        """The messages that the episode of a task begins with: its prompt, or the first request of a trial episode."""
        if task.data.prompt is not None:
            return [_message(one, {}) for one in messages_of(task.data)]
        return [_message(one, {}) for one in self._first_request(task).messages]

    def tools(self) -> list[Schema]:
        """The tools that the first task gives to the model."""
        task = self._task_at(0)
        if not (self._shared or task.toolsets(task.config) or self._env.taskset.toolsets(self._env.taskset.config)):
            return []
        return self._first_request(task).tools

    def _first_request(self, task: Task[Any, Any, Any]) -> ModelRequest:
        """The first model request of a trial episode."""
        state = self.reset({"index": task.data.idx, "key": task.key})
        request = self._episode(state).pending
        if request is None:
            self._rewards(state)
            raise ValueError(f"the episode of task {task.data.idx} asks for no turn")
        self.finish([], state)
        return request

    def _task_at(self, index: int) -> Task[Any, Any, Any]:
        found = self.tasks(index + 1)
        if index >= len(found):
            raise ValueError(f"the taskset has {len(found)} tasks, but no task {index}")
        return found[index]

    def _episode(self, state: dict[str, Any]) -> RunningEpisode:
        if state["episode"] not in self._episodes:
            raise ValueError("it has ended, after an error or with its worker process")
        return self._episodes[state["episode"]]

    @contextmanager
    def _ended_by_errors(self, name: str) -> Iterator[None]:
        """End the episode if the block raises, since nobody will ask for its next step."""
        try:
            yield
        except BaseException:
            if episode := self._episodes.pop(name, None):
                self._background.loop.call_soon_threadsafe(episode.work.cancel)
            raise

    def _rewards(self, state: dict[str, Any]) -> dict[str, float]:
        """The weighted rewards of an episode that has ended. Raises RuntimeError with the error that ended it."""
        episode = self._episodes.pop(state["episode"]).work.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        (trace,) = episode.traces
        return {name: reward.value for name, reward in trace.rewards.items() if reward is not None}

    def _answer(self, episode: RunningEpisode, turn: Message | None) -> None:
        self._background.run(lambda: episode.answer(turn))

    async def _serve(self) -> ModelContext:
        import httpx

        # One for all turns, because making one takes longer than a turn, and one for each loop, because no lock guards
        # its connections. A running episode holds one while it waits for its turn; the step's deadline is the limit.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        # not at the process's end, when the loop's thread is gone
        weakref.finalize(self, _close, self._client, self._background.loop).atexit = False
        self._open = AsyncExitStack()  # kept, because what it holds ends with this object
        for toolset in self._shared:
            await set_up(toolset, self._open)
        await self._open.enter_async_context(self._env.serving())
        return await Endpoint().serve()

    async def _start(self, name: str, task: Task[Any, Any, Any]) -> None:
        def register(trace: Any) -> None:
            RUNNING[trace.id] = episode
            episode.traces.append(trace.id)

        def forget(work: Any) -> None:
            for trace in episode.traces:
                del RUNNING[trace]

        played = copy.copy(task)
        episode = self._episodes[name] = RunningEpisode(take_over(played), self._shared, self._client)
        episode.work = asyncio.create_task(self._env.run_episode(played, self._context, on_trace=register))
        episode.work.add_done_callback(forget)
        await episode.advance()


def _close(client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    asyncio.run_coroutine_threadsafe(client.aclose(), loop)


def _check_unchanged(asked: list[dict[str, Any]], messages: list[Message]) -> None:
    """Raise ValueError if messages of the library are not those of the conversation."""
    if [(one["role"], _text(one)) for one in asked] != [(one["role"], _text(one)) for one in messages]:
        raise ValueError("the environment changes earlier messages, but a completion only grows")


def _message(message: dict[str, Any], results: dict[str, Message]) -> Message:
    """A message of the library. results: those of tools, by the id that the library has."""
    if message["role"] != "tool":
        return {"role": message["role"], "content": _text(message)}
    result = results.get(message.get("tool_call_id", ""), {"role": "tool", "name": UNKNOWN})
    return {**result, "content": _text(message)}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not all(part.get("type") == "text" for part in content):
        raise ValueError("a message has a part that is not text")
    return "".join(part["text"] for part in content)


def load_tasks(taskset: str, config: dict[str, Any], env: str, seconds: float, n: int) -> list[Any]:
    """[the first n tasks as examples, the schemas of their tools].

    For a worker process: the trainer does not import the environment's code. Raises RuntimeError with a sentence.
    """
    try:
        return _tasks_and_tools(Verifiers(taskset, config, env, seconds), n)
    except (Exception, SystemExit) as error:
        sentence = isinstance(error, ValueError | ImportError) and not where(error)
        raise RuntimeError(str(error) if sentence else raised(error)) from error


def _tasks_and_tools(environment: Verifiers, n: int) -> list[Any]:
    rows = [
        {
            **task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx", "prompt", "system_prompt"}),
            "prompt": environment.opening(task),
            "index": task.data.idx,
            "key": task.key,
        }
        for task in environment.tasks(n)
    ]
    return [rows, environment.tools() if rows else []]
