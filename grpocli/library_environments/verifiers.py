"""task=verifiers: environments of the library verifiers, played by the trainer's own engine.

The library runs an episode by itself and asks a chat endpoint for the turns of the model. Here the endpoint is a server
in the worker process, on the loopback interface, which hands each request to the trainer and waits for the turn. So
prompts, tools, rewards and stops are the library's, and the tokens and their mask are the trainer's.

The library starts a process for each toolset, for a task's own one in each episode; that takes seconds. A toolset is a
class of Python functions, so its functions are called here, through the library's own registration of them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import secrets
import sys
import types
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.config.parts import UserCode, part, require
from grpocli.config.user_code import no_such_file, raised
from grpocli.environments.environment import STEP_SHARE, EnvironmentConfig, Step
from grpocli.environments.tools import UNKNOWN, Schema, answer_to, call_in_worker, calls_in, encodable, refusal
from grpocli.errors import ConfigError
from grpocli.library_environments.library_task import BackgroundLoop, LibraryTask
from grpocli.tasks.task import Example
from grpocli.types import Message, Text

if TYPE_CHECKING:
    import httpx
    from aiohttp import web
    from verifiers.v1 import Env, Episode, ModelContext, Task, TaskData, Toolset, Trace

HERE = "grpocli.library_environments.verifiers"
KEY_HEADER = "X-Endpoint-Key"
LARGEST_REQUEST = 2**30
"""Most bytes of a request: all turns of an episode."""
FULL = "context_length_exceeded"
"""The error code of a request for which the context has no room."""
MODEL = "policy"
HARNESS = "grpocli_chat"
"""The name under which verifiers finds our harness."""
Function = Callable[[dict[str, Any]], Awaitable[Any]]
"""Calls a tool with arguments; returns a result of MCP."""
_TRACE: ContextVar[Trace] = ContextVar("trace")
"""The record of the episode that calls, whose state a tool reads and writes."""


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
    rows, schemas = call_in_worker(f"{HERE}:load_tasks", given, timeout, variables, "task.env", env)
    return rows, schemas


class Verifiers:
    """An environment of verifiers.

    taskset, config, env: as of `load_env`. seconds: deadline of a step. tool_schemas: the tools that the prompts show,
    None: not known.
    """

    def __init__(
        self, taskset: str, config: dict[str, Any], env: str, seconds: float, tool_schemas: list[Schema] | None = None
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
        return await serve()

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
    ours = {"idx", "prompt", "system_prompt"}
    try:
        environment = Verifiers(taskset, config, env, seconds)
        rows = [
            {
                **task.data.model_dump(mode="json", exclude_defaults=True, exclude=ours),
                "prompt": environment.opening(task),
                "index": task.data.idx,
                "key": task.key,
            }
            for task in environment.tasks(n)
        ]
        return [rows, environment.tools() if rows else []]
    except (Exception, SystemExit) as error:
        raise RuntimeError(raised(error)) from error


@dataclass(slots=True, eq=False)
class EpisodeTools:
    """The tools of an episode."""

    trace: Trace
    """The library's record of the episode."""
    schemas: list[Schema] = field(default_factory=list)
    """As the model sees them."""
    functions: dict[str, Function] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    async def open(
        cls, trace: Trace, own: Sequence[Toolset[Any, Any]], shared: Sequence[Toolset[Any, Any]]
    ) -> EpisodeTools:
        """own: toolsets of the episode, not yet set up; shared: those of all episodes."""
        tools = cls(trace)
        _TRACE.set(trace)
        for toolset in own:
            await set_up(toolset, tools.stack)
            await toolset.setup_task(trace.task.data)
        for toolset in [*shared, *own]:
            await tools._add(toolset)
        return tools

    async def call(self, call: Mapping[str, Any]) -> Message:
        """The result of a call, as a message of the role `tool`. call: `name`, `arguments`, perhaps `malformed`."""
        if problem := refusal(call, self.functions):
            return answer_to(call, self.functions, problem, failed=True)
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        _TRACE.set(self.trace)
        try:
            result = await self.functions[call["name"]](call["arguments"])
            content, failed = mcp_content_to_chat_content(result.content), bool(result.is_error)
        except Exception as error:  # noqa: BLE001 - becomes the result, as in the library's server
            content, failed = str(error), True
        return answer_to(call, self.functions, encodable(content) if isinstance(content, str) else content, failed)

    async def _add(self, toolset: Toolset[Any, Any]) -> None:
        from mcp.server.mcpserver import MCPServer

        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            if name in self.functions:
                raise ValueError(f"two tools have the name {name}: give a toolset another TOOL_PREFIX")
            shown = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            self.schemas.append({"type": "function", "function": shown})
            self.functions[name] = partial(server.call_tool, tool.name)


def take_over(owner: Any) -> list[Toolset[Any, Any]]:
    """The toolsets of a task or a taskset, which run in this process; the library no longer starts them.

    Raises ValueError for one that is elsewhere.
    """
    from verifiers.v1 import SubprocessConfig

    toolsets: list[Toolset[Any, Any]] = owner.toolsets(owner.config)
    for toolset in toolsets:
        if toolset.config.url or not isinstance(toolset.config.runtime, SubprocessConfig):
            raise ValueError(f"the toolset {type(toolset).__name__} has a url or a container; tools run here")
        _share_state(toolset)
    owner.toolsets = lambda config: []
    return toolsets


async def set_up(toolset: Toolset[Any, Any], stack: AsyncExitStack) -> None:
    """Set up a toolset; what it opens is closed with the stack."""
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()


def _share_state(toolset: Toolset[Any, Any]) -> None:
    """Let a toolset read and write the state of the episode that calls, which it otherwise does over HTTP."""
    from verifiers.v1.state import state_cls

    kind = state_cls(type(toolset))

    async def pull() -> Any:
        return kind.model_validate_json(_TRACE.get().state.model_dump_json())

    async def push(before: bytes) -> None:
        trace = _TRACE.get()
        trace.state = type(trace.state).model_validate_json(toolset.state.model_dump_json())

    toolset._pull_state, toolset._push_state = pull, push


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What an episode asks of the model. turn: receives the model's turn, or None if there is no further one."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    turn: asyncio.Future[dict[str, Any] | None]


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """An episode of the library."""

    toolsets: list[Toolset[Any, Any]]
    """Its own ones."""
    shared_toolsets: list[Toolset[Any, Any]]
    """Those of all episodes."""
    client: httpx.AsyncClient
    """Sends the library's requests; all episodes of a loop share it."""
    work: asyncio.Task[Episode] = field(init=False)
    requests: asyncio.Queue[ModelRequest] = field(default_factory=asyncio.Queue)
    pending: ModelRequest | None = None
    """The request that waits for a turn; None once the episode has ended."""
    tools: EpisodeTools | None = None
    """Opened by the harness."""
    traces: list[str] = field(default_factory=list)
    """Ids of its conversations."""
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those of the model's last turn, by the id that the library gets."""
    results: dict[str, Message] = field(default_factory=dict)
    """The results of these calls, by the same id."""

    async def advance(self) -> None:
        """Run until it asks for a turn, or ends. Raises ValueError if it has a second conversation."""
        asked = asyncio.create_task(self.requests.get())
        try:
            await asyncio.wait({asked, self.work}, return_when=asyncio.FIRST_COMPLETED)
            self.pending = asked.result() if asked.done() else None
        finally:
            asked.cancel()
        if len(self.traces) > 1:
            raise ValueError("the episode has several conversations, but a completion is one")

    async def answer(self, turn: Message | None) -> None:
        """Answer the pending request with a turn of the model, None: there is none, and advance."""
        assert self.pending is not None
        # ids that differ between calls and turns, because a model may repeat its own
        number, calls = len(self.pending.messages), enumerate(calls_in(turn or {}))
        self.calls, self.results = {f"call_{number}_{i}": call for i, call in calls}, {}
        self.pending.turn.set_result(None if turn is None else self._on_wire(turn))
        await self.advance()

    def _on_wire(self, turn: Message) -> dict[str, Any]:
        """A turn of the model in OpenAI's form."""
        calls = [
            {"id": i, "type": "function", "function": {"name": one["name"], "arguments": json.dumps(one["arguments"])}}
            for i, one in self.calls.items()
        ]
        return {"role": "assistant", "content": turn["content"], **({"tool_calls": calls} if calls else {})}


RUNNING: dict[str, RunningEpisode] = {}
"""The episodes of this process by the ids of the library's records, under which its requests and harnesses ask."""


async def serve() -> ModelContext:
    """Start a chat server on the loopback interface that hands requests to episodes; return the library's way to it."""
    import verifiers.v1 as vf
    from aiohttp import web

    key = secrets.token_urlsafe(16)

    async def answer(request: web.Request) -> web.Response:
        """A chat completion: the next turn of the model in the episode that asks."""
        given = request.headers.get(KEY_HEADER, "").encode(errors="replace")
        if not secrets.compare_digest(given, key.encode()):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        episode = RUNNING.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return web.json_response({"error": {"message": "there is no such episode"}}, status=400)
        body = await request.json()
        turn: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        await episode.requests.put(ModelRequest(body["messages"], body.get("tools") or [], turn))
        message = await turn
        if message is None:
            error = {"message": "the context is full", "code": FULL}
            return web.json_response({"error": error}, status=400)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        completion = {"id": "turn", "object": "chat.completion", "created": 0, "model": MODEL}
        return web.json_response({**completion, "choices": [choice], "usage": usage})

    app = web.Application(client_max_size=LARGEST_REQUEST)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = vf.EvalClientConfig(base_url=address, api_key_var="none", headers={KEY_HEADER: key})
    return vf.ModelContext(model=MODEL, client=client)


def load_env(taskset: str, config: dict[str, Any], env: str) -> Env[Any]:
    """The environment of a taskset, whose roles are all played by our harness in this process.

    taskset: the name of an installed package, or the path of a folder or a .py file.
    Raises ValueError if it has several roles, of which only one could be trained, or pydantic's for wrong keys.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

    _register_harness()
    name = _importable(taskset)
    roles = list(agent_config_fields(env_config_type(name, env)()))
    if len(roles) != 1:
        raise ValueError(f"the environment has the roles {', '.join(roles)}, but one model is trained")
    role = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    interception = {"type": "elastic"}  # a server holds at most 1,000 waiting requests
    given = {"id": env, "taskset": {**config, "id": name}, "interception": interception, roles[0]: role}
    return load_environment(resolve_env_config(given))


def messages_of(data: TaskData) -> list[dict[str, Any]]:
    """The system message and the prompt of a task."""
    from verifiers.v1.dialects.chat import message_to_wire

    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(one) for one in data.prompt or [])]


def _importable(taskset: str) -> str:
    """The module of a taskset; a folder or file is made importable."""
    path = Path(taskset).expanduser()
    if not (path.is_dir() or path.suffix == ".py"):
        return taskset
    path = path.resolve()
    sys.path.insert(0, str(path.parent))
    return path.stem


def _register_harness() -> None:
    """Make a harness known to verifiers, which finds it by the name of a module."""
    if HARNESS in sys.modules:
        return
    import httpx
    import verifiers.v1 as vf

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """The library's chat loop without a program of its own, which would start a process for each episode."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: vf.ModelContext,
            trace: vf.Trace,
            runtime: vf.Runtime,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
        ) -> vf.ProgramResult:
            """Turns of the model until one calls no tool; the answers to it come through the library's `resume`."""
            messages, tools = messages_of(data), await self._tools(trace)
            shown = {"tools": tools.schemas} if tools.schemas else {}
            while True:
                answer = await RUNNING[trace.id].client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages, **shown},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.status_code != httpx.codes.OK:
                    break
                turn = answer.json()["choices"][0]["message"]
                if not turn.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                messages = [*messages, turn, *await self._results(trace, tools, turn["tool_calls"])]
            if FULL in answer.text:  # the library's own name of this limit, so that it scores the episode as it is
                trace.stop("max_total_tokens")
            ended = trace.stop_condition is not None
            return vf.ProgramResult(exit_code=0 if ended else 1, stdout="", stderr="" if ended else answer.text)

        async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
            if (episode := RUNNING.get(trace.id)) and episode.tools:
                await episode.tools.stack.aclose()

        async def _tools(self, trace: vf.Trace) -> EpisodeTools:
            episode = RUNNING[trace.id]
            if episode.tools is None:
                episode.tools = await EpisodeTools.open(trace, episode.toolsets, episode.shared_toolsets)
            return episode.tools

        async def _results(self, trace: vf.Trace, tools: EpisodeTools, calls: list[dict[str, Any]]) -> list[Any]:
            """The messages of the role `tool` that answer calls, in OpenAI's form."""
            episode = RUNNING[trace.id]
            for call in calls:
                episode.results[call["id"]] = await tools.call(episode.calls[call["id"]])
            found = [(call["id"], episode.results[call["id"]]) for call in calls]
            return [{"role": "tool", "tool_call_id": i, "name": m["name"], "content": m["content"]} for i, m in found]

    module = types.ModuleType(HARNESS)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[HARNESS] = module
