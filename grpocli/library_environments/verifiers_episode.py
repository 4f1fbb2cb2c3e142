"""Running episodes of verifiers, and the endpoint at which the library asks for the turns of the model."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpocli.environments.tools import calls_in
from grpocli.types import Message

if TYPE_CHECKING:
    import httpx
    from aiohttp import web
    from verifiers.v1 import Episode, ModelContext, Toolset

    from grpocli.library_environments.verifiers_tools import EpisodeTools

KEY_HEADER = "X-Endpoint-Key"
LARGEST_REQUEST = 2**30
"""Most bytes of a request: all turns of an episode."""
FULL = "context_length_exceeded"
"""The error code of a request for which the context has no room."""
MODEL = "policy"


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
        self.calls, self.results = _calls_by_id(turn or {}, len(self.pending.messages)), {}
        self.pending.turn.set_result(None if turn is None else self._on_wire(turn))
        await self.advance()

    def _on_wire(self, turn: Message) -> dict[str, Any]:
        """A turn of the model in OpenAI's form."""
        message = {"role": "assistant", "content": turn["content"]}
        calls = [
            {
                "id": name,
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for name, call in self.calls.items()
        ]
        return message | ({"tool_calls": calls} if calls else {})


RUNNING: dict[str, RunningEpisode] = {}
"""The episodes of this process by the ids of the library's records, under which its requests and harnesses ask."""


def _calls_by_id(turn: Message, number: int) -> dict[str, dict[str, Any]]:
    """The calls of a turn by new ids, because a model may repeat its own. number: of the turn, so that ids differ."""
    return {f"call_{number}_{i}": call for i, call in enumerate(calls_in(turn))}


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
