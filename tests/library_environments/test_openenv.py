"""task=openenv: sessions of a real OpenEnv server."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from environments.tool_families import call

from grpocli.errors import ConfigError
from grpocli.library_environments.openenv import OpenEnv, OpenEnvTask, read_action

SESSIONS = 8  # more than a test leaves to a server that is slow to close them
SERVER = Path(__file__).with_name("openenv_server.py")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@contextmanager
def served(kind: str) -> Iterator[str]:
    """The address of a server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(SERVER), kind, str(port), str(SESSIONS)])
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{address}/schema")
                break
            except httpx.ConnectError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("guess") as address:
        yield address


@pytest.fixture(scope="module")
def environment(url: str) -> OpenEnv:
    return OpenEnv(url, "text", None, 20.0)


def begin(environment: OpenEnv, seed: int = 3) -> dict[str, Any]:
    return environment.reset({"reset": {"seed": seed}, "opening": f"guess {seed}"})


def say(environment: OpenEnv, state: dict[str, Any], text: str) -> Any:
    return environment.step([{"role": "assistant", "content": text}], state)


@pytest.mark.slow
def test_a_session_is_an_episode(environment: OpenEnv) -> None:
    digit = random.Random(3).randrange(10)
    state = begin(environment)
    assert say(environment, state, str(digit - 1))[:3] == ([{"role": "user", "content": "more"}], -0.25, False)
    assert say(environment, state, str(digit))[:3] == ([], 1.0, True)


@pytest.mark.slow
def test_sessions_are_closed_when_they_are_done_or_a_limit_ends_them(environment: OpenEnv) -> None:
    for _ in range(SESSIONS + 1):
        environment.finish([], begin(environment))
        say(environment, begin(environment), str(random.Random(3).randrange(10)))


def test_a_session_whose_step_fails_is_closed() -> None:
    environment, session = OpenEnv("http://127.0.0.1:1", None, "text", 5.0), AsyncMock()
    session.step.side_effect = RuntimeError("an error of the server")
    environment._sessions["one"] = session
    with pytest.raises(RuntimeError, match="an error of the server"):
        say(environment, {"session": "one"}, "3")
    session.close.assert_awaited_once()
    with pytest.raises(ValueError, match="and with it the session"):
        say(environment, {"session": "one"}, "3")


@pytest.mark.slow
def test_too_many_sessions_name_the_remedy(environment: OpenEnv) -> None:
    states: list[dict[str, Any]] = []
    try:
        with pytest.raises(ValueError, match="start it with a larger max_concurrent_envs"):
            states.extend(begin(environment) for _ in range(SESSIONS + 1))
    finally:
        for state in states:
            environment.finish([], state)


ONE_TEXT = {"required": ["message"], "properties": {"message": {"type": "string"}}}
ONE_NUMBER = {"required": ["index"], "properties": {"index": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "field", "schema", "action"),
    [
        ("go\nleft", "move", {}, {"move": "go\nleft"}),
        ('{"index": 3}', None, ONE_NUMBER, {"index": 3}),
        ('```json\n{"index": 3}\n```', None, ONE_NUMBER, {"index": 3}),
        (" left ", None, ONE_TEXT, {"message": " left "}),
        ("[3]", None, ONE_TEXT, {"message": "[3]"}),
    ],
)
def test_a_turn_is_read_as_an_action(text: str, field: str | None, schema: dict[str, Any], action: Any) -> None:
    assert read_action(text, field, schema) == action


@pytest.mark.slow
def test_what_does_not_fit_is_answered_or_refused(environment: OpenEnv, url: str) -> None:
    for schema in (ONE_NUMBER, {"required": ["a", "b"]}, {}):
        with pytest.raises(ValueError, match="an action is a JSON object with"):
            read_action("left", None, schema)
    state = begin(environment)
    (answer,), reward, done, _ = say(environment, state, '{"guess": 3}')
    assert (answer["content"][:6], reward, done) == ("error:", 0.0, False)
    environment.finish([], state)
    with pytest.raises(ValueError, match="have different first observations"):
        environment.reset({"reset": {"seed": 3}, "opening": "guess 4"})
    with pytest.raises(ValueError, match="'board'"):
        OpenEnv(url, "board", "message", 20.0).opening({"seed": 1})


@pytest.mark.slow
def test_examples_are_resets_and_the_first_are_held_out(url: str) -> None:
    task = OpenEnvTask(base_url=url, observation="text", train_size=2, eval_size=1, system_prompt="Guess.")
    (held_out,) = task.examples("eval")
    assert held_out == {
        "prompt": [{"role": "system", "content": "Guess."}, {"role": "user", "content": "guess 0"}],
        "reset": {"seed": 0},
        "opening": "guess 0",
    }
    assert [one["reset"] for one in task.examples("train")] == [{"seed": 1}, {"seed": 2}]


@pytest.mark.survival
def test_calls_of_tools_are_actions() -> None:
    with served("add") as address:
        task = OpenEnvTask(base_url=address, observation="result", train_size=2, eval_size=1)
        (example, *_) = task.examples("train")
        schemas = task.tool_schemas()
        assert [one["function"]["name"] for one in schemas] == ["add", "stop"]
        assert set(schemas[0]["function"]["parameters"]["properties"]) == {"a", "b"}
        environment = OpenEnv(address, "result", None, 20.0, schemas)
        state = environment.reset(example)

        def act(*calls: dict[str, Any]) -> Any:
            return environment.step([{"role": "assistant", "content": "", "tool_calls": list(calls)}], state)

        unreadable = {**call("unknown"), "malformed": "it has no end"}
        step = act({**call("add", a=1, b=2), "id": "one"}, unreadable, call("add", a="x"), call("rm"))
        assert (step.reward, step.done) == (0.5, False)
        assert step.observation[0] == {"role": "tool", "name": "add", "content": "3", "tool_call_id": "one"}
        assert [one["name"] for one in step.observation[1:]] == ["unknown", "add", "unknown"]
        assert all(one["is_error"] for one in step.observation[1:])
        assert act(call("stop", why="enough"))[1:3] == (0.0, True)
        state = environment.reset(example)
        assert environment.step([{"role": "assistant", "content": "no"}], state)[:3] == ([], 0.0, True)


@pytest.mark.survival
def test_a_server_that_does_not_answer_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as refused:
        OpenEnvTask(base_url="http://127.0.0.1:9", train_size=1, eval_size=1).examples("train")
    assert (refused.value.key, "\n" in str(refused.value)) == ("task.base_url", False)


@pytest.mark.parametrize("total", [3, 150, 400, 10_000])
def test_held_out_examples_do_not_depend_on_the_size_of_the_training_data(total: int) -> None:
    for sizes in ((40, 1000), (1, 90)):
        tasks = [OpenEnvTask(base_url="http://127.0.0.1:1", train_size=n, eval_size=100) for n in sizes]
        splits = [
            [set(task.rows_of(split, min(total, task.wanted), "task.env", "x")) for split in ("train", "eval")]
            for task in tasks
        ]
        assert splits[0][1] == splits[1][1]
        for (train, held_out), n in zip(splits, sizes, strict=True):
            assert not train & held_out
            assert len(train) == min(n, total - len(held_out))
            assert 1 <= len(held_out) <= max(1, total // 5)
