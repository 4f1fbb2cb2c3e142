"""Tools of verifiers' tasks: shown by the prompt, called by the model, run by the library's own code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from environments.test_tools import arguments, run  # noqa: F401
from environments.tool_families import FAMILIES
from library_environments.test_verifiers import begin, say

from grpocli.environments.environment import EnvironmentConfig, loaded_environment_of
from grpocli.library_environments.verifiers import Verifiers, VerifiersTask

SUMS = Path(__file__).with_name("tool_taskset.py")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]


@lru_cache
def sums(**config: Any) -> Verifiers:
    return Verifiers(str(SUMS), config, "", 20.0)


def call(name: str, **values: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": values}}


def turn(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_calls_are_run_by_the_library_and_change_the_episodes_own_state() -> None:
    environment = sums()
    assert [one["function"]["name"] for one in environment.tools()] == ["notes_note", "add", "fail"]
    played = [begin(environment, index) for index in (0, 1)]
    for number, (messages, state) in enumerate(played, 1):
        messages.append(turn(call("add", a=1, b=number), {**call("notes_note", text="x"), "id": "mine"}))
        observation, reward, done, _ = environment.step(messages, state)
        assert observation == [
            {"role": "tool", "name": "add", "content": str(1 + number)},
            {"role": "tool", "name": "notes_note", "content": "noted x", "tool_call_id": "mine"},
        ]
        assert (reward, done) == ({}, False)
        messages += observation
    ends = [say(environment, messages, state, "2").reward for messages, state in played]
    assert ends == [{"right": 1.0, "added": 11 / 8}, {"right": 0.0, "added": 11 / 8}]


def test_wrong_calls_are_answered() -> None:
    messages, state = begin(sums(), 0)
    unreadable = {**call("unknown"), "malformed": "it has no end"}
    messages.append(turn(unreadable, call("rm"), call("add", a=1), call("fail", how="win")))
    answers = sums().step(messages, state).observation
    assert [(one["name"], one.get("is_error", False)) for one in answers] == [
        ("unknown", True), ("unknown", True), ("add", True), ("fail", True)
    ]  # fmt: skip
    assert answers[0]["content"] == "error: the call cannot be read: it has no end"
    assert answers[1]["content"] == "error: there is no such tool; there are notes_note, add, fail"
    assert "Field required" in answers[2]["content"]
    assert "cannot win" in answers[3]["content"]
    messages += answers
    assert say(sums(), messages, state, "2").reward["right"] == 1.0


def test_a_task_with_other_tools_is_refused() -> None:
    environment = Verifiers(str(SUMS), {"others": True}, "", 20.0, sums().tools())
    first, second = environment.tasks(2)
    environment.reset({"index": 0, "key": first.key})
    with pytest.raises(ValueError, match="task 1 has other tools than task 0"):
        environment.reset({"index": 1, "key": second.key})


@pytest.mark.survival
def test_a_server_of_mcp_is_called(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(SUMS)], env={**os.environ, "MCP_PORT": str(port)})
    try:
        config = {"task": {"tools": {"url": f"http://127.0.0.1:{port}/mcp"}}}
        environment = Verifiers(str(SUMS), config, "", 60.0)
        messages, state = begin(environment, 0)
        messages.append(turn(call("add", a=20, b=22)))
        assert environment.step(messages, state).observation[0]["content"] == "42"
        environment.finish(messages, state)
    finally:
        server.kill()
        server.wait()


def sum_task(**given: Any) -> VerifiersTask:
    return VerifiersTask(env=str(SUMS), train_size=4, eval_size=2, **given)


def environment() -> EnvironmentConfig:
    """That of a loaded task."""
    made = sum_task().environment
    return replace(made, arguments={**made.arguments, "tool_schemas": sums().tools()})


@pytest.mark.survival
def test_a_loaded_task_knows_its_tools() -> None:
    assert loaded_environment_of(sum_task()) == environment()


@pytest.mark.processes
@pytest.mark.parametrize(
    "family", ["qwen", *(pytest.param(name, marks=pytest.mark.survival) for name in ("llama", "gemma"))]
)
def test_a_call_and_its_result_are_token_exact_and_counted(run: Any, family: str) -> None:  # noqa: F811
    """Tokens are the engine's; the results between them are those of the template, and masked."""
    end = FAMILIES[family].end
    good, bad = (FAMILIES[family].calls((name, arguments(family, a=3, b=3))) for name in ("add", "subtract"))
    task = sums().tasks(3)[2]
    played = {"text": sums().opening(task), "index": 2, "key": task.key}
    done, engine = run(FAMILIES[family], environment(), good, bad, f"6{end}", **played)
    assert done.episode is not None
    assert done.mask is not None
    assert done.episode.problem is None
    written = [token for token, mask in zip(done.token_ids, done.mask, strict=True) if mask]
    assert engine.tokenizer.decode(written) == f"{good}{bad}6{end}"
    spoken = engine.tokenizer(f"6{end}", add_special_tokens=False).input_ids
    assert engine.seen[2][0].token_ids + spoken == engine.seen[0][0].token_ids + done.token_ids
    assert "notes_note" in engine.tokenizer.decode(engine.seen[0][0].token_ids)
    results = [message for message in done.episode.messages if message["role"] == "tool"]
    assert results[0]["content"] == "6"
    assert (done.episode.calls, done.episode.failures) == ({"add": 1, "unknown": 1}, {"add": 0, "unknown": 1})
    assert done.episode.rewards == {"right": 1.0, "added": 1 / 8}
