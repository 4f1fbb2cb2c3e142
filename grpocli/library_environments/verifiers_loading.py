"""How an environment of verifiers is loaded, with a harness that asks the trainer for the turns of its model."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest
from grpocli.library_environments.verifiers_episode import FULL, RUNNING
from grpocli.library_environments.verifiers_tools import EpisodeTools

if TYPE_CHECKING:
    from pydantic import ValidationError
    from verifiers.v1 import Env, TaskData

HARNESS = "grpocli_chat"
"""The name under which verifiers finds `ChatHarness`."""


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
        raise ValueError(_wrong_key(error, name)) from error
    return load_environment(resolved)


def _wrong_key(error: ValidationError, taskset: str) -> str:
    """The first problem of a taskset's config, with the key that users type."""
    from verifiers.v1 import TasksetConfig
    from verifiers.v1.utils.loaders import taskset_config_type

    problem = error.errors(include_url=False)[0]
    section, *path = map(str, problem["loc"])
    key = ".".join(["task.config" if section == "taskset" else section, *path])
    if problem["type"] == "extra_forbidden":
        own = sorted(taskset_config_type(taskset).model_fields, key=lambda name: name in TasksetConfig.model_fields)
        names = [name for name in own if name != "id"]
        known = f"; the keys are {', '.join(names)}{nearest(path[0], names)}" if len(path) == 1 else ""
        return f"there is no key {key}{known}"
    value = f"={problem['input']}" if isinstance(problem["input"], str | int | float) else ""
    return f"{key}{value}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


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
