"""task=verifiers: environments of the library verifiers, played by the trainer's own engine.

The library runs an episode by itself and asks a chat endpoint for the turns of the model. Here the endpoint is a server
in the worker process, on the loopback interface, which hands each request to the trainer and waits for the turn. So
prompts, rewards and stops are the library's, and the tokens and their mask are the trainer's.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.environments.background_loop import BackgroundLoop
from grpocli.environments.environment import Step
from grpocli.types import Message

if TYPE_CHECKING:
    from aiohttp import web
    from verifiers.v1 import Env, Episode, ModelContext, Task, TaskData

HARNESS = "grpocli_chat"
"""The name under which verifiers finds `ChatHarness`."""
KEY_HEADER = "X-Endpoint-Key"
FULL = "context_length_exceeded"
"""The error code of a request for which the context has no room."""
MODEL = "policy"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What an episode asks of the model. turn: receives the model's text, or None if there is no further turn."""

    messages: list[dict[str, Any]]
    turn: asyncio.Future[str | None]


@dataclass(slots=True)
class RunningEpisode:
    """An episode of the library. pending: the request that waits for a turn; None once the episode has ended."""

    task: asyncio.Task[Episode]
    requests: asyncio.Queue[ModelRequest]
    pending: ModelRequest | None = None


class Verifiers:
    """An environment of verifiers.

    taskset: its name; config: keys of the taskset; env: name of a paired environment; seconds: deadline of a step.
    """

    def __init__(self, taskset: str, config: dict[str, Any], env: str, seconds: float) -> None:
        self._episodes: dict[str, RunningEpisode] = {}
        self._traces: dict[str, RunningEpisode] = {}
        self._key = secrets.token_urlsafe(16)
        self._background = BackgroundLoop(seconds)
        self._env: Env[Any] = load_env(taskset, config, env)
        self._tasks: list[Task[Any, Any, Any]] = []
        self._source: Iterator[Task[Any, Any, Any]] = iter(self._env.taskset)
        self._context: ModelContext = self._background.run(self._serve)

    def reset(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Start the episode of the task with the example's `index`, and run it until it asks for the first turn."""
        task = self._task_at(int(metadata["index"]))
        if task.key != metadata["key"]:
            raise ValueError(f"task {metadata['index']} differs at each load; a taskset must be reproducible")
        name = secrets.token_urlsafe(8)
        self._background.run(lambda: self._start(name, task))
        return {"episode": name}

    def step(self, messages: list[Message], metadata: dict[str, Any]) -> Step:
        """Give the episode the model's turn; run it until it asks for the next one, or ends."""
        episode = self._episode(metadata)
        request = episode.pending
        if request is None:
            self._rewards(metadata)
            raise ValueError("the episode ends without the model's turn")
        if _plain(request.messages) != _plain(messages[:-1]):
            raise ValueError("the environment changes earlier messages, but a completion only grows")
        self._answer_turn(episode, messages[-1]["content"])
        if episode.pending is None:
            return Step([], self._rewards(metadata), True, metadata)
        asked = episode.pending.messages
        if _plain(asked[: len(messages)]) != _plain(messages):
            raise ValueError("the environment changes earlier messages, but a completion only grows")
        return Step([_message(one) for one in asked[len(messages) :]], {}, False, metadata)

    def finish(self, messages: list[Message], metadata: dict[str, Any]) -> dict[str, float]:
        """End an episode that has no further turn, as a full context does; returns the library's rewards of it."""
        episode = self._episode(metadata)
        while episode.pending is not None:
            self._answer_turn(episode, None)
        return self._rewards(metadata)

    def tasks(self, n: int) -> list[Task[Any, Any, Any]]:
        """The first n tasks, fewer if there are not so many."""
        self._tasks += itertools.islice(self._source, max(n - len(self._tasks), 0))
        return self._tasks[:n]

    def opening(self, task: Task[Any, Any, Any]) -> list[Message]:
        """The messages that the episode of a task begins with: its prompt, or the first request of a trial episode."""
        if task.data.prompt is not None:
            return [_message(one) for one in messages_of(task.data)]
        state = self.reset({"index": task.data.idx, "key": task.key})
        request = self._episode(state).pending
        if request is None:
            self._rewards(state)
            raise ValueError(f"the episode of task {task.data.idx} asks for no turn")
        messages = [_message(one) for one in request.messages]
        self.finish(messages, state)
        return messages

    def _task_at(self, index: int) -> Task[Any, Any, Any]:
        found = self.tasks(index + 1)
        if index >= len(found):
            raise ValueError(f"the taskset has {len(found)} tasks, but no task {index}")
        return found[index]

    def _episode(self, state: dict[str, Any]) -> RunningEpisode:
        if state["episode"] not in self._episodes:
            raise ValueError("its worker process ended, and with it the running episode")
        return self._episodes[state["episode"]]

    def _rewards(self, state: dict[str, Any]) -> dict[str, float]:
        """The weighted rewards of an episode that has ended. Raises RuntimeError with the error that ended it."""
        running = self._episodes.pop(state["episode"])
        episode = running.task.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        for trace in episode.traces:
            self._traces.pop(trace.id, None)
        if not episode.ok:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        (trace,) = episode.traces
        return {name: reward.value for name, reward in trace.rewards.items() if reward is not None}

    def _answer_turn(self, episode: RunningEpisode, content: str | None) -> None:
        """Answer the pending request of an episode, and run it until the next request, or its end."""
        assert episode.pending is not None
        self._background.loop.call_soon_threadsafe(episode.pending.turn.set_result, content)
        self._background.run(lambda: self._advance(episode))

    async def _serve(self) -> ModelContext:
        import verifiers.v1 as vf
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        self._serving = self._env.serving()  # kept, because what it serves ends with this object
        await self._serving.__aenter__()
        headers = {KEY_HEADER: self._key}
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="none", headers=headers)
        return vf.ModelContext(model=MODEL, client=client)

    async def _answer(self, request: web.Request) -> web.Response:
        """A chat completion: the next turn of the model in the episode that asks."""
        from aiohttp import web

        if not secrets.compare_digest(request.headers.get(KEY_HEADER, ""), self._key):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        episode = self._traces[request.headers["X-Session-ID"]]
        turn: asyncio.Future[str | None] = self._background.loop.create_future()
        await episode.requests.put(ModelRequest((await request.json())["messages"], turn))
        content = await turn
        if content is None:
            error = {"message": "the context is full", "code": FULL}
            return web.json_response({"error": error}, status=400)
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        completion = {"id": "turn", "object": "chat.completion", "created": 0, "model": MODEL}
        return web.json_response({**completion, "choices": [choice], "usage": usage})

    async def _start(self, name: str, task: Task[Any, Any, Any]) -> None:
        def register(trace: Any) -> None:
            self._traces[trace.id] = episode

        work = self._env.run_episode(task, self._context, on_trace=register)
        episode = RunningEpisode(asyncio.create_task(work), asyncio.Queue())
        self._episodes[name] = episode
        await self._advance(episode)

    async def _advance(self, episode: RunningEpisode) -> None:
        """Run an episode until it asks for a turn, or ends."""
        asked = asyncio.create_task(episode.requests.get())
        try:
            await asyncio.wait({asked, episode.task}, return_when=asyncio.FIRST_COMPLETED)
            episode.pending = asked.result() if asked.done() else None
        except asyncio.CancelledError:  # by the deadline
            episode.task.cancel()
            raise
        finally:
            asked.cancel()


def _plain(messages: list[Any]) -> list[tuple[str, str]]:
    """The roles and texts of messages."""
    return [(one["role"], _text(one)) for one in messages]


def _message(message: dict[str, Any]) -> Message:
    return {"role": message["role"], "content": _text(message)}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not all(part.get("type") == "text" for part in content):
        raise ValueError("a message has a part that is not text")
    return "".join(part["text"] for part in content)


def load_env(taskset: str, config: dict[str, Any], env: str) -> Env[Any]:
    """The environment of a taskset, whose roles are all played by `ChatHarness` in this process.

    taskset: the name of an installed package, or the path of a folder or a .py file.
    Raises ValueError if it has several roles, of which only one could be trained.
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
    return load_environment(
        resolve_env_config({"id": env, "taskset": {"id": name, **config}, "interception": interception, roles[0]: role})
    )


def messages_of(data: TaskData) -> list[dict[str, Any]]:
    """The system message and the prompt of a task."""
    from verifiers.v1.dialects.chat import message_to_wire

    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(one) for one in data.prompt or [])]


def load_rows(taskset: str, config: dict[str, Any], env: str, seconds: float, n: int) -> list[dict[str, Any]]:
    """The first n tasks as examples, for a worker process: the trainer does not import the environment's code."""
    environment = Verifiers(taskset, config, env, seconds)
    return [
        {
            **task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx", "prompt", "system_prompt"}),
            "prompt": environment.opening(task),
            "index": task.data.idx,
            "key": task.key,
        }
        for task in environment.tasks(n)
    ]


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

    # One for all turns, because making one takes longer than a turn. Each running episode holds a connection while it
    # waits for its turn, for which the step's deadline is the limit.
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """The library's chat loop without a program of its own, which would start a process for each episode."""

        APPENDS_SYSTEM_PROMPT = True
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
            """One turn of the model; the answers to it come through the library's `resume`."""
            messages = messages_of(data)
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            if FULL in answer.text:  # the library's own name of this limit, so that it scores the episode as it is
                trace.stop("max_total_tokens")
            ended = answer.status_code == httpx.codes.OK or trace.stop_condition is not None
            return vf.ProgramResult(exit_code=0 if ended else 1, stdout="", stderr="" if ended else answer.text)

    return ChatHarness
