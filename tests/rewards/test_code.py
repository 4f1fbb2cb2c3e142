"""reward=[code]: programs in completions, and machines without isolation."""

from __future__ import annotations

import sys

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards import code
from grpocli.rewards.code import CodeReward
from grpocli.rewards.reward import Failure, Sample
from grpocli.sandbox import cgroup, select_backend
from grpocli.sandbox.backends import no_isolation

pytestmark = pytest.mark.processes

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


def sample(text, **columns):
    return Sample("", text, text, {"tests": TESTS, **columns}, token_ids=[], max_tokens=10, truncated=False)


@pytest.fixture
def reward():
    made = CodeReward(timeout=3, workers=2)
    try:
        made.check(["tests"])
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def test_programs_are_right_wrong_or_cannot_be_scored(reward):
    samples = [sample(ADD), sample(ADD.replace("+", "*")), sample(""), sample(ADD, tests=None), sample(ADD, tests=[3])]
    right, wrong, empty, without, odd = reward(samples)
    assert (right, wrong, empty) == (1, 0, 0)
    assert isinstance(without, Failure)
    assert "no tests in the column 'tests'" in without.reason
    assert isinstance(odd, Failure)


def test_partial_scores_count_passed_tests():
    reward = CodeReward(partial=True, right=2.0, wrong=-1.0, timeout=3)
    try:
        assert reward([sample(ADD.replace("+", "*")), sample(ADD), sample("")]) == [0.5, 2.0, -1.0]
        ends = "import os\ndef add(a, b):\n    return a + b if a == b else os._exit(0)"
        assert reward([sample(ends)]) == [0.5]
    finally:
        reward.close()


def test_columns_may_surround_the_program(reward):
    given = {"before": "def add(a, b):\n", "setup": "two = 2", "tests": "assert add(two, two) == 4"}
    assert reward([sample("    return a + b\n", **given)]) == [1]
    own = {"answer": "def max(a):\n    return 7", "tests": "assert max([]) == 7"}
    assert reward([sample("def max(a):\n    return 7", **own)]) == [1]


def test_the_explanation_has_the_error_and_the_output(reward):
    assert "AssertionError" in reward.explain(sample(ADD.replace("+", "*")))
    assert "printed 'hello'" in reward.explain(sample("print('hello')"))


def test_another_interpreters_packages_can_be_imported():
    """The packages of that interpreter can be imported, and those of this environment cannot."""
    program = "import numpy\ndef add(a, b):\n    return int(numpy.add(a, b))"
    for python, expected in ((sys.executable, 1), (None, 0)):
        reward = CodeReward(python=python, timeout=20, memory_mb=2048)
        try:
            assert reward([sample(program)]) == [expected], reward.explain(sample(program))
        finally:
            reward.close()


def test_a_machine_without_control_groups_gives_a_warning(monkeypatch):
    monkeypatch.setattr(cgroup, "parent_group", lambda: None)
    assert CodeReward().warning.startswith(
        "reward.code.memory_mb=512 limits each process of a program, not all together"
    )
    monkeypatch.setattr(cgroup, "parent_group", lambda: "here")
    assert CodeReward().warning == ""


def test_a_missing_interpreter_is_reported():
    with pytest.raises(ConfigError, match=r"reward.code.python=/no/python: does not start"):
        CodeReward(python="/no/python").check(["tests"])


def test_a_machine_without_isolation_is_refused(monkeypatch):
    monkeypatch.setattr(select_backend, "available_backends", lambda python: [no_isolation(python)])
    code.working_backend.cache_clear()
    with pytest.raises(ConfigError, match=r"no sandbox for programs works on this machine .*reward.code.unsafe=true"):
        CodeReward(memory_mb=256).check(["tests"])
    reward = CodeReward(unsafe=True)
    try:
        reward.check(["tests"])
        assert reward.warning.startswith("reward.code.unsafe=true: programs that the model writes run as you")
        assert reward([sample(ADD)]) == [1]
    finally:
        reward.close()
        code.working_backend.cache_clear()


@pytest.mark.parametrize(
    ("field", "value"), [("timeout", 0), ("memory_mb", 8), ("processes", -1), ("disk_mb", 0), ("workers", -1)]
)
def test_invalid_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"reward.code.{field}={value}: "):
        CodeReward(**{field: value})


def test_a_missing_column_is_reported():
    with pytest.raises(ConfigError, match=r"reward.code.answer_column=tests: .*columns answer"):
        CodeReward().check(["answer"])
