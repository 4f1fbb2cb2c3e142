"""An error in user code names its file and line, wherever that code runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpocli import cli
from grpocli.composition.compose import build_run, compose
from grpocli.config.user_code import load
from grpocli.environments.worker_functions import _environment, call
from grpocli.errors import GrpoError
from grpocli.launch.trainer_process import as_grpo_error
from grpocli.rewards.python import PythonReward
from grpocli.rewards.reward import Sample
from grpocli.rewards.scorer import call as score
from grpocli.runs.run_dir import RunDir
from grpocli.tasks.table import process

SOURCE = """\
import asyncio, json
from grpocli.rewards.reward import BaseReward

def first(text):
    return text[99]

def plain(completions, **kwargs):
    return [first(c) for c in completions]

async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return [first(c) for c in completions]

def below(completions, **kwargs):
    return [json.loads("{") for c in completions]

def row(row):
    return {"prompt": row["gone"]}

class Board:
    def __init__(self, bad=False):
        if bad:
            raise ValueError("no board")
    def reset(self, metadata):
        return metadata[7]
    def step(self, messages, metadata):
        raise SystemExit("done")

class Part(BaseReward):
    def __call__(self, samples): ...
    def __post_init__(self):
        raise ValueError("no part")
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _environment.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "framed_mine.py").write_text(SOURCE)
    (tmp_path / "unfinished.py").write_text("x = 1\n\ndef f(:\n")
    (tmp_path / "absent.py").write_text("import grpocli\nimport no_such_package\n")
    return tmp_path


def of_reward(function: str) -> str:
    sample = Sample("1+1=", "2", "2", {}, [1], 8, False)
    reward = PythonReward(function=function, process=function.endswith("below"))
    (found,) = score(reward, [sample])
    reward.close()
    return found.reason


def message_of(function: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each has another message
        function(*given)
    assert isinstance(caught.value, GrpoError | RuntimeError)
    return str(caught.value)


def of_part() -> str:
    return message_of(build_run, compose(["+reward.mine={_target_:'framed_mine:Part'}"]))


def of_a_run() -> str:
    """The message of a run, or of one of its processes, for any error, whose frames are not of this file."""
    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(load("framed_mine.py:first", "key"), "short").exception()
    assert isinstance(error, Exception)
    return str(as_grpo_error(error, RunDir(Path("run"))))


FIRST = "framed_mine.py:5, in first: return text[99]"
CASES: dict[str, tuple[Callable[[], str], str]] = {
    "reward": (
        lambda: of_reward("framed_mine.py:plain"),
        f"it raised IndexError: string index out of range ({FIRST}; called at framed_mine.py:8, in ",
    ),
    "a library that the function calls": (lambda: of_reward("framed_mine.py:below"), "(framed_mine.py:15, in "),
    "row": (
        lambda: message_of(process, "framed_mine.py:row", {"a": 1}, "line 3"),
        'raised KeyError: \'gone\' (framed_mine.py:18, in row: return {"prompt": row["gone"]})',
    ),
    "environment in reset": (
        lambda: message_of(call, "reset", "framed_mine.py:Board", "{}", {}),
        "KeyError: 7 (framed_mine.py:25, in reset: return metadata[7])",
    ),
    "environment that exits": (
        lambda: message_of(call, "step", "framed_mine.py:Board", "{}", [], {}),
        "SystemExit: done (framed_mine.py:27, in step: ",
    ),
    "part": (of_part, "framed_mine.py:32, in __post_init__: raise ValueError("),
    "syntax": (
        lambda: message_of(load, "unfinished.py:f", "key"),
        "importing it raised SyntaxError: invalid syntax (unfinished.py:3: def f(:)",
    ),
    "import": (
        lambda: message_of(load, "absent.py:f", "key"),
        "ModuleNotFoundError: No module named 'no_such_package' (absent.py:2, in <module>: import no_such_package)",
    ),
    "an unexpected error": (
        of_a_run,
        f"IndexError: string index out of range ({FIRST}); the traceback is in run/run.log",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_users_file_and_line_are_named(kind: str) -> None:
    message, sentence = CASES[kind]
    text = message()
    assert sentence in text
    assert len(text.splitlines()) == 1
    assert not re.search(r"grpocli/\w+/\w+\.py", text), "it names a file of grpocli"


@pytest.mark.parametrize("kind", ["reward", "environment in reset", "syntax"])
def test_the_traceback_is_included_on_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_TRACEBACK", "1")
    message, sentence = CASES[kind]
    assert sentence.partition(";")[0] in message()
    assert "Traceback (most recent call last)" in message()


@pytest.mark.parametrize(
    ("fails", "in_message"),
    [(lambda: load("absent.py:f", "key"), True), (lambda: compose(["optim.Traceback=1"]), False)],
)
def test_the_command_prints_one_traceback(
    fails: Callable[[], Any], in_message: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For an error in user code it is in the message, for others it is printed before it."""
    monkeypatch.setenv("GRPOCLI_TRACEBACK", "1")
    monkeypatch.setattr(cli, "run", lambda args: fails())
    with pytest.raises(SystemExit):
        cli.main([])
    output = capsys.readouterr().err
    assert "Traceback (most recent call last)" in output
    assert output.startswith("grpocli: error: ") == in_message
