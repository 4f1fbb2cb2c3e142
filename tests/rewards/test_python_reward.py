"""reward=[python], with functions like those in TRL's documentation."""

from __future__ import annotations

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards.python import PythonReward, load
from grpocli.rewards.reward import Failure, Score

SOURCE = """
import asyncio
import os
import random
import re

def longer(completions, **kwargs):
    return [float(len(c)) for c in completions]

def starts_well(completions, **kwargs):
    return [1.0 if c[0]["content"].startswith("Well") else 0.0 for c in completions]

def equals(completions, truth, **kwargs):
    return [float(c == t) for c, t in zip(completions, truth, strict=True)]

def only_math(prompts, completions, task, **kwargs):
    return [float(c == "4") if t == "math" else None for c, t in zip(completions, task, strict=True)]

async def waits(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def few(completions, truth):
    return [1] * len(completions)

def everything(**kwargs):
    assert set(kwargs) == {"prompts", "completions", "completion_ids", "truth", "task"}, kwargs
    assert kwargs["completion_ids"] == [[7, 7], [7]]
    return [0.0] * len(kwargs["prompts"])

def spoils(completion_ids, **kwargs):
    for ids in completion_ids:
        ids.clear()
    return [0.0] * len(completion_ids)

def optional(completions, other=None):
    return [float(other is None)] * len(completions)

class Counter:
    def __call__(self, completions, **kwargs):
        return range(len(completions))

counter = Counter()

def short(completions, **kwargs):
    return [1.0]

def stuck(completions, **kwargs):
    return [float(bool(re.match("(a+)+$", c))) for c in completions]

def anything(completions, how, **kwargs):
    if how[0] == "leave":
        raise SystemExit("enough")
    if how[0] == "scalar":
        return 1.0
    return [None if d is None else random.random() if h == "draw" else os.getpid() for h, d in zip(how, kwargs["day"])]

def scalar(completions, **kwargs):
    return 1.0

async def never(completions, **kwargs):
    await asyncio.sleep(600)

not_callable = 3
"""


@pytest.fixture
def reward(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return lambda name, **fields: PythonReward(function=f"{path}:{name}", **fields)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("longer", [1.0, 4.0]),
        ("equals", [1.0, 0.0]),
        ("only_math", [1.0, None]),
        ("waits", [2.0, 2.0]),
        ("few", [1, 1]),
        ("everything", [0.0, 0.0]),
        ("optional", [1.0, 1.0]),
        ("counter", [0, 1]),
    ],
)
def test_scores_of_plain_data(reward, sample, name: str, scores: list[float | None]) -> None:
    given = [sample("4", tokens=2, truth="4", task="math"), sample("four", truth="4", task="code")]
    made = reward(name)
    made.check(["task", "truth"])
    assert made(given) == scores


def test_a_function_cannot_change_the_samples(reward, sample) -> None:
    given = [sample("4", tokens=2)]
    reward("spoils")(given)
    assert given[0].token_ids == [7, 7]


def test_conversations_are_lists_of_messages(reward, sample) -> None:
    given = [sample("Well, 4", chat=True), sample("4", chat=True)]
    assert reward("starts_well")(given) == [1.0, 0.0]


@pytest.mark.parametrize(("name", "said"), [("short", "1 values for 2 samples"), ("scalar", "1.0, expected a list")])
def test_a_result_of_the_wrong_shape_fails_every_sample(reward, sample, name: str, said: str) -> None:
    scores = reward(name)([sample("a"), sample("b")])
    assert all(isinstance(s, Failure) and said in s.reason for s in scores)


@pytest.mark.processes
def test_an_async_function_has_a_deadline(reward, sample) -> None:
    with pytest.raises(TimeoutError, match=r"0\.05 s \(reward\.python\.timeout\)"):
        reward("never", timeout=0.05)([sample("a")])


@pytest.mark.processes
def test_with_process_a_hanging_function_is_killed(reward, sample) -> None:
    """This includes calls in a thread, which cannot be interrupted."""
    made = reward("stuck", timeout=0.5, process=True)
    try:
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(made, [sample("a" * 60 + "b"), sample("b")]).result(60)
        assert [score.reason for score in scores] == ["it took longer than 0.5 s (reward.python.timeout)"] * 2
        assert made([sample("a")]) == [1.0]
    finally:
        made.close()


@pytest.mark.processes
def test_with_process_the_scores_are_the_same(reward, sample) -> None:
    made = reward("anything", process=True)

    def asked(how: str, tokens: int = 1) -> list[Score]:
        return made([sample("a", how=how, day=date(2026, 1, 1), tokens=tokens), sample("b", how=how, day=None)])

    try:
        first, none = asked("ask")
        assert first != os.getpid()
        assert none is None
        assert asked("ask", tokens=2)[0] == first  # the process and its state persist
        assert asked("draw") == asked("draw") != asked("draw", tokens=2)
        assert all("it raised SystemExit: enough (" in score.reason for score in asked("leave"))
        assert all("1.0, expected a list" in score.reason for score in asked("scalar"))
    finally:
        made.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("longr", 'has no function or class longr; did you mean "longer"'),
        ("not_callable", "is of type int; give a function or a class"),
        ("equals", "needs 'truth', but the task has no such column"),
    ],
)
def test_a_function_with_other_arguments_is_refused_before_training(reward, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.python\.function=.*mine\.py") as caught:
        reward(name).check(["answer"])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("reward.py", "must be FILE.py:NAME or module:NAME"),
        ("gone.py:f", "there is no such file"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_a_missing_function_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        PythonReward(function=function).check(["answer"])


@pytest.mark.parametrize("source", ["1 / 0", "import sys; sys.exit(0)", "def f(:"])
def test_a_file_that_cannot_be_imported_is_reported(tmp_path: Path, source: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    for _ in range(2):  # its half-imported module is removed
        with pytest.raises(ConfigError, match=r"reward\.python\.function=.*bad\.py:f: importing it raised"):
            PythonReward(function=f"{path}:f").check([])


def test_paths_and_modules_of_the_current_folder_can_import_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 5.0")
    source = "from neighbour_of_rewards import VALUE\ndef f(completions): return [VALUE] * len(completions)\n"
    (tmp_path / "rewards_here.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for function in ("rewards_here.py:f", "rewards_here:f"):
        assert load(function, "key")(completions=["a"]) == [5.0]


def test_the_function_is_loaded_once(reward) -> None:
    path = inspect.getfile(load(reward("longer").function, "key"))
    assert load(f"{path}:longer", "key") is load(f"{path}:longer", "key")
