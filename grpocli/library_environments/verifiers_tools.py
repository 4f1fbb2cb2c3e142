"""Tools of verifiers' tasks: toolsets run in the process of their episode, servers of MCP as the library starts them.

The library starts a process for each toolset, for a task's own one in each episode; that takes seconds. A toolset is a
class of Python functions, so its functions are called here, through the library's own registration of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from grpocli.environments.tools import Schema, answer_to, refusal
from grpocli.types import Message

if TYPE_CHECKING:
    from verifiers.v1 import Toolset, Trace

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
