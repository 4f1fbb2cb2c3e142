"""reward=[python]: functions in every form that TRL accepts, and functions that misbehave."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpocli.composition.compose import build_run, compose
from grpocli.errors import ConfigError
from grpocli.rewards.python import PythonReward
from grpocli.rewards.reward import Failure, Score
from grpocli.rewards.scorer import call

SOURCE = """
import asyncio
import atexit
import os
import random
import re
import sys

def longer(completions, **kwargs):
    return [float(len(c)) for c in completions]

def starts_well(prompts, completions, **kwargs):
    assert all(turns[-1]["role"] == "user" for turns in prompts)
    return [c[0]["content"].startswith("Well") for c in completions]

def equals(completions, truth, **kwargs):
    return [float(c == t) for c, t in zip(completions, truth, strict=True)]

def only_math(completions, task, **kwargs):
    return [float(c == "4") if t == "math" else None for c, t in zip(completions, task, strict=True)]

async def waits(prompts, completions, **kwargs):
    return await asyncio.gather(*[asyncio.sleep(0, 2.0) for _ in completions])

def everything(**kwargs):
    assert set(kwargs) == {"prompts", "completions", "completion_ids", "truth", "task", "day", "image"}, kwargs
    assert kwargs["completion_ids"] == [[7, 7], [7]]
    return [float(day.year) + image.sum() for day, image in zip(kwargs["day"], kwargs["image"])]

def optional(completions, other=None, log_metric=None, log_extra=None):
    return [float(other is log_metric is log_extra is None)] * len(completions)

class Counter:
    def __call__(self, completions, **kwargs):
        return range(len(completions))

counter = Counter()
calls = 0

def counts(completions):
    global calls
    calls += 1
    return [calls, os.getpid()]

def draws(completions):
    import numpy, torch
    return [random.random(), float(numpy.random.random()) + torch.rand(()).item()]

def short(completions, **kwargs):
    return [1.0]

def scalar(completions, **kwargs):
    return 1.0

class Unreadable(Exception):
    def __str__(self):
        raise self


def raises_unreadable(completions, **_):
    raise Unreadable


def raises(completions, **kwargs):
    raise SystemExit("enough")

def texts(completions, **kwargs):
    return ["good", 1.0]

def prints(completions, **kwargs):
    atexit.register(print, "at the end")
    print("to \x1b[2Jstdout")
    print("to stderr", file=sys.stderr)
    return [os.environ["MY_KEY"] == "mine", 1.0]

def by_step(completions, trainer_state):
    return [0.0] * len(completions)

class Judge:
    pass

not_callable = 3
"""


@pytest.fixture
def reward(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "mine.py").write_text(SOURCE)
    made: list[PythonReward] = []

    def make(name: str, **fields: Any) -> PythonReward:
        made.append(PythonReward(function=f"{tmp_path}/mine.py:{name}", **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "scores", "process"),
    [
        ("longer", [1.0, 4.0], False),
        ("equals", [1.0, 0.0], False),
        ("only_math", [1.0, None], True),
        ("waits", [2.0, 2.0], True),
        ("everything", [2028.0, 2028.0], True),
        ("optional", [1.0, 1.0], False),
        ("counter", [0, 1], False),
    ],
)
def test_scores_of_plain_data(reward, sample, name: str, scores: list[float | None], process: bool) -> None:
    """Dates and arrays travel to the function's process as they are."""
    more = {"truth": "4", "day": date(2026, 1, 1), "image": np.ones(2)}
    given = [sample("4", tokens=2, task="math", **more), sample("four", task="code", **more)]
    made = reward(name, process=process)
    made.check(["task", "truth"])
    assert call(made, given) == scores


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "process", "said"),
    [
        ("short", False, ["1 values for 2 samples"] * 2),
        ("scalar", True, ["1.0, expected a list"] * 2),
        ("texts", True, ["it returned 'good', expected a number", 1.0]),
        ("raises", False, ["it raised SystemExit: enough (", "it raised SystemExit: enough ("]),
        ("raises", True, ["it raised SystemExit: enough (", "it raised SystemExit: enough ("]),
        ("raises_unreadable", True, ["it raised Unreadable ("] * 2),
    ],
)
def test_what_is_no_score_is_a_failure_with_a_reason(reward, sample, name: str, process: bool, said: list[Any]) -> None:
    for score, expected in zip(call(reward(name, process=process), [sample("a"), sample("b")]), said, strict=True):
        assert expected in score.reason if isinstance(score, Failure) else score == expected


@pytest.mark.processes
def test_a_function_keeps_its_state_and_its_random_numbers_depend_on_the_samples(reward, sample) -> None:
    (first, pid), (second, same) = (reward_ := reward("counts"))([sample("a")] * 2), reward_([sample("a")] * 2)
    assert (first, second) == (1.0, 2.0)
    assert pid == same != os.getpid()
    for process in (True, False):
        made = reward("draws", process=process)

        def drawn(tokens: int, made: PythonReward = made) -> list[Score]:
            return call(made, [sample("a", tokens=tokens), sample("b")])

        drawn(1)  # imports numpy and torch, whose generators are seeded from then on
        random.seed(5)
        before = random.getstate()
        assert drawn(1) == drawn(1) != drawn(2)
        assert random.getstate() == before


@pytest.mark.processes
def test_output_and_environment_are_those_of_the_run(
    reward, sample, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    made = reward("prints")
    assert made([sample("a"), sample("b")]) == [1.0, 1.0]
    made.close()
    assert {"to stdout", "to stderr", "at the end"} <= set(all_output(capsys).splitlines())


def all_output(capsys: pytest.CaptureFixture[str]) -> str:
    """What workers have printed that have ended."""
    for thread in threading.enumerate():
        if thread.name == "worker output":
            thread.join(30)
    return capsys.readouterr().err


@pytest.mark.processes
def test_a_process_that_replaces_another_says_if_it_runs_another_file(
    reward, sample, capsys: pytest.CaptureFixture[str]
) -> None:
    made = reward("counts")
    _, pid = made([sample("a")] * 2)
    path = Path(made.function.rpartition(":")[0])
    os.utime(path, (time.time() + 10,) * 2)
    os.kill(int(pid), signal.SIGKILL)
    assert made([sample("a")] * 2)[0] == 1.0
    made.close()
    assert "mine.py:counts has changed since the run began" in all_output(capsys)


ATTACKS = {
    "forks": ("if os.fork() == 0: return [0.0] * 2", [1.0, 2.0]),
    "threads": ("threading.Thread(target=time.sleep, args=(600,)).start()", [1.0, 2.0]),
    "alarm": ("signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1)", [1.0, 2.0]),
    "settings": (
        "import torch; torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64); torch.set_num_threads(3)",
        [1.0, 2.0],
    ),
    "folder": ("os.chdir('/')", [1.0, 2.0]),
    "output": ("os.close(0); os.close(1); os.close(2)", [1.0, 2.0]),
    "silence": ("sys.stdout = sys.stderr = None", [1.0, 2.0]),
    "much text": ("print('x' * 10**6)", [1.0, 2.0]),
    "descriptors": ("os.closerange(0, 256)", "its worker process died"),
    "leaves": ("os._exit(0)", "its worker process died"),
    "execs": ("os.execlp('true', 'true')", "its worker process died"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "its worker process died"),
    "kills": ("os.kill(os.getpid(), 9)", "its worker process was killed twice"),
    "memory": ("bytearray(2**60)", "it raised MemoryError"),
    "never returns": ("time.sleep(600)", "it took longer than 2 s (reward.python.timeout)"),
    "regex": ("re.match('(a+)+$', 'a' * 60 + 'b')", "it took longer than 2 s (reward.python.timeout)"),
    "a lock that is held": ("sum(range(10**13))", "it took longer than 2 s (reward.python.timeout)"),
}


def state() -> list[Any]:
    """What an attack must not change in the trainer."""
    files = sorted(os.listdir("/proc/self/fd"))[:3]  # noqa: PTH208
    return [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), Path.cwd(), files]


@pytest.mark.survival
@pytest.mark.processes
def test_a_function_that_misbehaves_costs_its_own_samples_at_most(tmp_path: Path, sample) -> None:
    bodies = "\n".join(
        f"def {re.sub(' ', '_', name)}(completions):\n    {body}\n    return [1.0, 2.0]"
        for name, (body, _) in ATTACKS.items()
    )
    imports = "import os, re, signal, sys, threading, time"
    (tmp_path / "mine.py").write_text(f"{imports}\n{bodies}\n")
    before = state()
    for name, (_, expected) in ATTACKS.items():
        timeout = 2 if "longer than" in expected else 60
        made = PythonReward(function=f"{tmp_path}/mine.py:{re.sub(' ', '_', name)}", timeout=timeout)
        scores = call(made, [sample("a"), sample("b")])
        made.close()
        if isinstance(expected, list):
            assert scores == expected, name
        else:
            assert all(isinstance(one, Failure) and one.reason.startswith(expected) for one in scores), (name, scores)
        assert state() == before, name


@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("longr", 'has no function or class longr; did you mean "longer"'),
        ("not_callable", "is of type int; give a function or a class"),
        ("equals", "needs 'truth', but the task has no such column"),
        ("by_step", "needs 'trainer_state', but the task has no such column"),
        ("Judge", "is a class; one derived from BaseReward is chosen as reward=[mine.py:Judge]"),
    ],
)
@pytest.mark.processes
def test_a_function_that_cannot_be_called_is_refused_before_training(
    reward, name: str, said: str, process: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        reward(name, process=process).check(["answer"])
    assert caught.value.key == "reward.python.function"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("reward.py", "must be FILE.py:NAME or module:NAME"),
        ("gone.py:f", "there is no such file"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("divides.py:f", "importing it raised ZeroDivisionError"),
        ("ends.py:f", "importing it raised SystemExit"),
        ("half.py:f", "importing it raised SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in {"divides": "1 / 0", "ends": "import sys; sys.exit(0)", "half": "def f(:"}.items():
        Path(f"{name}.py").write_text(source)
    for _ in range(2):  # its half-imported module is removed
        with pytest.raises(ConfigError, match=said):
            PythonReward(function=function, process=False).check(["answer"])


def test_each_function_of_a_list_has_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    task = ["task=jsonl", "task.path=rows.jsonl", "task.answer_column=null"]
    run = build_run(compose([*task, "reward=[mine.py:longer,mine.py:by_step]", "reward.by_step.process=false"]))
    assert list(run.reward) == ["longer", "by_step"]
    with pytest.raises(ConfigError) as caught:
        run.reward["by_step"].check([])
    assert caught.value.key == "reward.by_step.function"
