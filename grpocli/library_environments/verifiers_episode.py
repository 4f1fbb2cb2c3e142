"""Running episodes of verifiers in a worker process: their tools, the endpoint that they ask for turns, their harness.

The library starts a process for each toolset, for a task's own one in each episode; that takes seconds. A toolset is a
class of Python functions, so its functions are called here, through the library's own registration of them. Servers of
MCP start as the library starts them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.environments.tools import Schema, answer_to, calls_in, refusal
from grpocli.types import Message

if TYPE_CHECKING:
    import httpx
    from aiohttp import web
    from verifiers.v1 import Env, Episode, ModelContext, TaskData, Toolset, Trace

KEY_HEADER = "X-Endpoint-Key"
LARGEST_REQUEST = 2**30
"""Most bytes of a request: all turns of an episode."""
FULL = "context_length_exceeded"
"""The error code of a request for which the context has no room."""
MODEL = "policy"
HARNESS = "grpocli_chat"
"""The name under which verifiers finds `ChatHarness`."""
Function = Callable[[dict[str, Any]], Awaitable[Any]]
"""Calls a tool with arguments; returns a result of MCP."""
_TRACE: ContextVar[Trace] = ContextVar("trace")
"""The record of the episode that calls, whose state a tool reads and writes."""


@dataclass(slots=True, eq=False)
class EpisodeTools:
    """The tools of an episode. schemas: as the model sees them; trace: the library's record of the episode."""

    trace: Trace
    schemas: list[Schema] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    async def open(
        cls,
        trace: Trace,
        own: Sequence[Toolset[Any, Any]],
        shared: Sequence[Toolset[Any, Any]],
        urls: Mapping[str, str],
    ) -> EpisodeTools:
        """own: toolsets of the episode, not yet set up; shared: those of all episodes; urls: servers of MCP."""
        tools = cls(trace)
        _TRACE.set(trace)
        for toolset in own:
            await set_up(toolset, tools.stack)
            await toolset.setup_task(trace.task.data)
        for toolset in [*shared, *own]:
            await tools._add_toolset(toolset)
        if urls:
            await tools._add_servers(urls)
        return tools

    async def call(self, call: Mapping[str, Any]) -> Message:
        """The result of a call, as a message of the role `tool`. call: `name`, `arguments`, perhaps `malformed`."""
        if problem := refusal(call, self.functions):
            return answer_to(call, self.functions, problem, failed=True)
        try:
            content, failed = await self._run(call)
        except Exception as error:  # noqa: BLE001 - becomes the result, as in the library's server
            content, failed = str(error), True
        if isinstance(content, str):
            content = content.encode(errors="replace").decode()
        return answer_to(call, self.functions, content, failed)

    async def _run(self, call: Mapping[str, Any]) -> tuple[Any, bool]:
        """The content of a result, and whether the call failed."""
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        _TRACE.set(self.trace)
        result = await self.functions[call["name"]](call["arguments"])
        return mcp_content_to_chat_content(result.content), bool(result.is_error)

    async def _add_toolset(self, toolset: Toolset[Any, Any]) -> None:
        from mcp.server.mcpserver import MCPServer

        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            self._add(toolset.server_name, tool, partial(server.call_tool, tool.name))

    async def _add_servers(self, urls: Mapping[str, str]) -> None:
        from verifiers.v1.harnesses.utils.mcp import connect_mcp

        config = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
        schemas, places, servers = await connect_mcp(config, self.stack, set(self.functions))
        self.schemas += schemas
        for name, (server, raw) in places.items():
            self.functions[name] = partial(_call_server, servers[server], raw)

    def _add(self, server: str, tool: Any, function: Function) -> None:
        name = f"{server}_{tool.name}" if server else tool.name
        if name in self.functions:
            raise ValueError(f"two tools have the name {name}: give a toolset another TOOL_PREFIX")
        shown = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        self.schemas.append({"type": "function", "function": shown})
        self.functions[name] = function


async def _call_server(server: Any, name: str, arguments: dict[str, Any]) -> Any:
    return await server.run(lambda client: client.call_tool(name, arguments))


def take_over(owner: Any) -> list[Toolset[Any, Any]]:
    """The toolsets of a task or a taskset that run in this process; the library no longer starts these."""
    here = [toolset for toolset in owner.toolsets(owner.config) if _runs_here(toolset)]
    declared = type(owner).toolsets
    owner.toolsets = lambda config: [toolset for toolset in declared(config) if not _runs_here(toolset)]
    for toolset in here:
        _share_state(toolset)
    return here


async def set_up(toolset: Toolset[Any, Any], stack: AsyncExitStack) -> None:
    """Set up a toolset; what it opens is closed with the stack."""
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()


def _runs_here(toolset: Toolset[Any, Any]) -> bool:
    from verifiers.v1 import SubprocessConfig

    return not toolset.config.url and isinstance(toolset.config.runtime, SubprocessConfig)


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
    """An episode of the library.

    toolsets, shared_toolsets: those that run in this process, of the episode and of all; tools: opened by the harness.
    client: sends the library's requests; all episodes of a loop share it.
    pending: the request that waits for a turn; None once the episode has ended. traces: ids of its conversations.
    calls: those of the model's last turn, by the id that the library gets; results: their results, by the same id.
    """

    toolsets: list[Toolset[Any, Any]]
    shared_toolsets: list[Toolset[Any, Any]]
    client: httpx.AsyncClient
    work: asyncio.Task[Episode] = field(init=False)
    requests: asyncio.Queue[ModelRequest] = field(default_factory=asyncio.Queue)
    pending: ModelRequest | None = None
    tools: EpisodeTools | None = None
    traces: list[str] = field(default_factory=list)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, Message] = field(default_factory=dict)

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


class Endpoint:
    """A chat server on the loopback interface that hands each request to its episode and waits for the turn."""

    def __init__(self) -> None:
        self._key = secrets.token_urlsafe(16)

    async def serve(self) -> ModelContext:
        """Start it; return the library's way to it."""
        import verifiers.v1 as vf
        from aiohttp import web

        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        headers = {KEY_HEADER: self._key}
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="none", headers=headers)
        return vf.ModelContext(model=MODEL, client=client)

    async def _answer(self, request: web.Request) -> web.Response:
        """A chat completion: the next turn of the model in the episode that asks."""
        from aiohttp import web

        given = request.headers.get(KEY_HEADER, "").encode(errors="replace")
        if not secrets.compare_digest(given, self._key.encode()):
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


def load_env(taskset: str, config: dict[str, Any], env: str) -> Env[Any]:
    """The environment of a taskset, whose roles are all played by `ChatHarness` in this process.

    taskset: the name of an installed package, or the path of a folder or a .py file.
    Raises ValueError if it has several roles, of which only one could be trained, or a config with wrong keys.
    """
    from pydantic import ValidationError
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
    try:
        resolved = resolve_env_config(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])).replace("taskset.", "task.config.", 1)
        raise ValueError(f"{where}={problem['input']!r:.60}: {problem['msg']}") from error
    return load_environment(resolved)


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
    """Make `ChatHarness` known to verifiers, which finds a harness by the name of a module."""
    if HARNESS in sys.modules:
        return
    module = types.ModuleType(HARNESS)
    module.ChatHarness = _harness_class()  # type: ignore[attr-defined]
    module.__all__ = ["ChatHarness"]  # type: ignore[attr-defined]
    sys.modules[HARNESS] = module


def _harness_class() -> type:
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
            messages, tools = messages_of(data), await self._tools(trace, mcp_urls)
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

        async def _tools(self, trace: vf.Trace, mcp_urls: dict[str, str]) -> EpisodeTools:
            episode = RUNNING[trace.id]
            if episode.tools is None:
                episode.tools = await EpisodeTools.open(trace, episode.toolsets, episode.shared_toolsets, mcp_urls)
            return episode.tools

        async def _results(self, trace: vf.Trace, tools: EpisodeTools, calls: list[dict[str, Any]]) -> list[Any]:
            """The messages of the role `tool` that answer calls, in OpenAI's form."""
            episode = RUNNING[trace.id]
            for call in calls:
                episode.results[call["id"]] = await tools.call(episode.calls[call["id"]])
            found = [(call["id"], episode.results[call["id"]]) for call in calls]
            return [{"role": "tool", "tool_call_id": i, "name": m["name"], "content": m["content"]} for i, m in found]

    return ChatHarness
