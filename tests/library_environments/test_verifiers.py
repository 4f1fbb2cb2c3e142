"""task=verifiers: the library's own episodes, prompts, tools and rewards, with turns from the trainer's engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from environments.test_tools import arguments, run  # noqa: F401
from environments.tool_families import FAMILIES, call

from grpocli.environments.environment import EnvironmentConfig, loaded_environment_of
from grpocli.errors import ConfigError
from grpocli.library_environments.verifiers import RUNNING, Verifiers, VerifiersTask, load_tasks
from grpocli.rewards.reward import Failure
from grpocli.rewards.worker_pool import WorkerPool

COUNTING = Path(__file__).with_name("counting_taskset.py")
SUMS = COUNTING.with_name("tool_taskset.py")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]


@lru_cache
def counting(kind: str) -> Verifiers:
    return Verifiers(str(COUNTING), {"kind": kind}, "", 20.0)


def begin(environment: Verifiers, index: int = 1) -> tuple[list[Any], dict[str, Any]]:
    task = environment.tasks(index + 1)[index]
    return environment.opening(task), environment.reset({"index": index, "key": task.key})


def say(environment: Verifiers, messages: list[Any], state: dict[str, Any], text: str) -> Any:
    messages.append({"role": "assistant", "content": text})
    step = environment.step(messages, state)
    messages += step.observation
    return step


def test_an_episode_is_played_and_scored_by_the_library() -> None:
    environment = counting("plain")
    messages, state = begin(environment)
    assert messages == [{"role": "user", "content": "say 1"}]
    assert say(environment, messages, state, "no")[:3] == ([{"role": "user", "content": "turn 1"}], {}, False)
    assert say(environment, messages, state, "never")[:3] == ([{"role": "user", "content": "turn 2"}], {}, False)
    assert say(environment, messages, state, "1")[:3] == ([], {"turns": 1.5, "right": 1.0}, True)


def test_episodes_that_run_together_do_not_mix() -> None:
    environment = counting("plain")
    played = [begin(environment, index) for index in (0, 1, 2)]
    for messages, state in played:
        say(environment, messages, state, "no")
    messages, state = played.pop()
    assert environment.finish(messages, state) == {"turns": 0.5, "right": 0.0}, "a limit ends it, and it is scored so"
    ends = [say(environment, messages, state, "1").reward for messages, state in played]
    assert [end.get("right") for end in ends] == [None, 1.0]


@pytest.mark.survival
def test_many_episodes_wait_for_their_turns_at_a_time() -> None:
    environment = counting("plain")
    played = [begin(environment, index) for index in range(150)]  # more than the 100 connections of a client's default
    assert [
        say(environment, messages, state, str(i)).reward["right"] for i, (messages, state) in enumerate(played)
    ] == [1.0] * len(played)


@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        ("system", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say 0"}]),
        ("opens", [{"role": "user", "content": "you begin"}]),
    ],
)
def test_the_prompt_is_what_the_episode_begins_with(kind: str, opening: list[Any]) -> None:
    messages, state = begin(counting(kind), 0)
    assert messages == opening
    assert say(counting(kind), messages, state, "0").reward == {"turns": 0.5, "right": 1.0}


def test_an_episode_whose_step_fails_is_over() -> None:
    """Nobody asks for its next step, so it must not wait for one."""
    environment = Verifiers(str(COUNTING), {}, "", 1.0)
    failures = {"sleep": TimeoutError, "other": ValueError}
    for text, error in failures.items():
        messages, state = begin(environment)
        changed = [{"role": "user", "content": "say 7"}] if text == "other" else messages
        before = len(RUNNING)
        with pytest.raises(error):
            say(environment, changed, state, text)
        with pytest.raises(ValueError, match="it has ended"):
            say(environment, messages, state, "1")
        deadline = time.monotonic() + 60
        while len(RUNNING) == before:
            assert time.monotonic() < deadline, "the episode waits"
            time.sleep(0.01)


@pytest.fixture
def worker() -> Iterator[Callable[..., list[Any]]]:
    """Calls of an environment in a worker process, with 2 s for a step."""
    pool = WorkerPool("grpocli.environments.worker_functions:call", 1, 120.0)
    arguments = json.dumps({"taskset": str(COUNTING), "config": {}, "env": "", "seconds": 2})
    name = "grpocli.library_environments.verifiers:Verifiers"

    def call(*items: list[Any]) -> list[Any]:
        return pool.map([[method, name, arguments, *given] for method, *given in items])

    yield call
    pool.close()


@pytest.mark.survival
def test_a_step_that_hangs_costs_its_episode_and_the_death_of_a_worker_all_that_it_holds(
    worker: Callable[..., list[Any]],
) -> None:
    key = counting("plain").tasks(1)[0].key
    states = [state for (state,) in worker(*[["reset", {"index": 0, "key": key}]] * 3)]
    prompt = {"role": "user", "content": "say 0"}

    def turn(state: Any, text: str) -> Any:
        return worker(["step", [prompt, {"role": "assistant", "content": text}], state])[0]

    hung = turn(states[0], "sleep")
    assert isinstance(hung, Failure)
    assert "longer than 2 s" in hung.reason
    assert turn(states[1], "no")[0] == [{"role": "user", "content": "turn 1"}]
    for lost in (turn(states[2], "die"), turn(states[1], "0")):
        assert isinstance(lost, Failure)
        assert "it has ended, after an error or with its worker process" in lost.reason


def task_of(**given: Any) -> VerifiersTask:
    return VerifiersTask(env=str(COUNTING), train_size=4, eval_size=2, **given)


def test_examples_are_tasks_with_their_columns_and_the_first_are_held_out() -> None:
    task = task_of(format="plain")
    train, held_out = task.examples("train"), task.examples("eval")
    assert [one["prompt"] for one in held_out] == ["say 0", "say 1"]
    assert [one["prompt"] for one in train] == [f"say {i}" for i in range(2, 6)]
    assert [(one["index"], one["answer"]) for one in train] == [(i, str(i)) for i in range(2, 6)]


def test_what_an_episode_may_not_do_ends_it() -> None:
    environment = counting("plain")
    _, state = begin(environment)
    with pytest.raises(ValueError, match="changes earlier messages"):
        environment.step([{"role": "user", "content": "say 7"}, {"role": "assistant", "content": "7"}], state)
    with pytest.raises(ValueError, match="must be reproducible"):
        environment.reset({"index": 0, "key": "another"})
    raising = counting("raises")
    state = raising.reset({"index": 0, "key": raising.tasks(1)[0].key})
    with pytest.raises(RuntimeError, match="the board is lost"):
        raising.finish([], state)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"nn": 1}, r"taskset\.nn"),
        ({"n": "many"}, r"taskset\.n .*many"),
        ({"kind": "exits"}, r"SystemExit: bye \(.*counting_taskset\.py:\d+, in load: "),
        ({"kind": "variable"}, r"KeyError: 'COUNTING_KEY'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(config: dict[str, Any], message: str) -> None:
    """In a worker process; the next test has its answer in the main process."""
    with pytest.raises(RuntimeError, match=rf"{message}[^\n]*$"):
        load_tasks(str(COUNTING), config, "", 20.0, 6)


def test_a_taskset_gets_no_variable_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTING_KEY", "secret")
    with pytest.raises(ConfigError, match="KeyError: 'COUNTING_KEY'") as refused:
        task_of(config={"kind": "variable", "n": 9}).examples("train")
    assert (refused.value.key, "secret" in str(refused.value)) == ("task.env", False)


def test_a_missing_file_or_folder_is_named_before_anything_is_loaded() -> None:
    for name in ("counting_tasksets.py", "./environments", "~/no_environment"):
        with pytest.raises(ConfigError) as refused:
            VerifiersTask(env=name).check_ready()
        assert refused.value.key == "task.env"
    VerifiersTask(env="owner/package").check_ready()


@lru_cache
def sums(**config: Any) -> Verifiers:
    return Verifiers(str(SUMS), config, "", 20.0)


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


def test_a_toolset_elsewhere_is_refused() -> None:
    environment = Verifiers(str(SUMS), {"task": {"tools": {"url": "http://127.0.0.1:1/mcp"}}}, "", 20.0)
    with pytest.raises(ValueError, match="the toolset Sums has a url"):
        begin(environment, 0)


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
