"""reward=[code]: programs in completions, and machines without isolation."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing

import pytest

from grpocli.errors import ConfigError
from grpocli.rewards import code
from grpocli.rewards.code import CodeReward
from grpocli.rewards.reward import Failure, Sample
from grpocli.sandbox import backends, cgroup
from grpocli.sandbox.backends import no_isolation

pytestmark = pytest.mark.processes

PLAIN = "def add(a, b):\n    return a + b\n"
ADD = f"```python\n{PLAIN}```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


def sample(text, **columns):
    return Sample("", text, text, {"tests": TESTS, **columns}, token_ids=[], max_tokens=10, truncated=False)


@pytest.fixture
def reward():
    with closing(CodeReward(timeout=3, workers=2)) as made:
        try:
            made.check(["tests"])
        except ConfigError as error:
            pytest.skip(str(error))
        yield made


def test_programs_are_right_wrong_or_cannot_be_scored(reward):
    samples = [sample(ADD), sample(ADD.replace("+", "*")), sample(""), sample(ADD, tests=None), sample(ADD, tests=[3])]
    right, wrong, empty, without, odd = reward(samples)
    assert (right, wrong, empty) == (1, 0, 0)
    assert isinstance(without, Failure)
    assert "has no tests" in without.reason
    assert isinstance(odd, Failure)


SUBTRACT = ADD.replace("+", "-")
SCRIPT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
METHOD = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
CHECK = "def check(candidate):\n    assert candidate(5, 2) == 7\n"
CASE = """
import unittest

class Sums(unittest.TestCase):
    def test_five(self):
        self.assertEqual(add(5, 2), 7)
"""
CONTEST = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 2", "output": " 7 \n\n"}]
ENTRY = {"entry_point": "add"}
FUNCTIONAL = [
    {"input": "1\n2", "output": "3", "testtype": "functional"},
    {"input": "5\n2", "output": "7", "testtype": "functional"},
]
PYTEST = """
from solution import add

def test_one():
    assert add(1, 2) == 3

def test_five():
    assert add(5, 2) == 7
"""


@pytest.mark.parametrize(
    ("right", "tests", "columns"),
    [
        pytest.param(ADD, json.dumps(TESTS), {}, id="JSON text of asserts"),
        pytest.param(ADD, PYTEST, {}, id="pytest functions"),
        pytest.param(ADD, CASE, {}, id="unittest"),
        pytest.param(ADD, CHECK, ENTRY, id="HumanEval"),
        pytest.param(METHOD, CHECK, {"entry_point": "Solution().add", "answer": METHOD[10:-3]}, id="LeetCode"),
        pytest.param(ADD, "add(5, 2) == 7", {}, id="bare comparison"),
        pytest.param(ADD, "import math\nmath.isclose(add(5, 2), 7)\nall([add(5, 2) == 7])", {}, id="bare conditions"),
        pytest.param(ADD, f"if __name__ == '__main__':\n    {TESTS[0]}", {}, id="script"),
        pytest.param(SCRIPT, CONTEST, {}, id="contest"),
        pytest.param(SCRIPT, {"input": ["1 2", "5 2"], "output": ["3", "7"]}, {}, id="CodeContests"),
        pytest.param(SCRIPT, '{"inputs": ["1 2", ["5 2"]], "outputs": ["3", ["7"]]}', {}, id="APPS"),
        pytest.param(
            ADD, '{"fn_name": "add", "inputs": [[1, 2], [5, 2]], "outputs": [3, [7]]}', {}, id="APPS function"
        ),
        pytest.param(METHOD, json.dumps(FUNCTIONAL), {"metadata": '{"func_name": "add"}'}, id="LiveCodeBench"),
        pytest.param(SCRIPT, [{"stdin": "5 2", "stdout": "7"}], {}, id="stdin"),
        pytest.param(
            SCRIPT, {"language": "python", "test_cases": [{"type": "stdin_stdout", **CONTEST[0]}]}, {}, id="SYNTHETIC"
        ),
        pytest.param(
            ADD,
            json.dumps({"test_cases": [{"type": "function_call", "fn_name": "add", "input": [5, 2], "output": [7]}]}),
            {},
            id="SYNTHETIC function",
        ),
        pytest.param(ADD, [{"input": [5, 2], "output": 7}], ENTRY, id="arguments"),
        pytest.param(ADD, [{"input": {"a": 5, "b": 2}, "output": 7}], ENTRY, id="named arguments"),
        pytest.param(ADD, [{"input": "5, 2", "output": "7"}], ENTRY, id="arguments as text"),
        pytest.param(
            METHOD, [{"input": "a = 5, b = 2", "output": "7"}], {"entry_point": "Solution().add"}, id="LeetCodeDataset"
        ),
        pytest.param(ADD, f"Tests:\n\n```python\n{TESTS[0]}\n```", {}, id="fence"),
        pytest.param(SCRIPT, f"```json\n{json.dumps(CONTEST)}\n```", {}, id="fence of JSON"),
        pytest.param(ADD, f"import pytest\n{PYTEST}", {}, id="KodCode"),
        pytest.param(
            ADD, "class TestAdd:\n    def test_five(self):\n        assert add(5, 2) == 7", {}, id="test class"
        ),
        pytest.param(ADD, f"from solution import *\n{TESTS[0]}", {}, id="import *"),
        pytest.param(ADD, "from solution import add as plus\nassert plus(5, 2) == 7", {}, id="import as"),
        pytest.param(ADD, "for given, wanted in zip([[5, 2]], [7]):\n    assert add(*given) == wanted", {}, id="MBPP+"),
        pytest.param(
            "```python\ndef add(text, a=0):\n    b = len(text)\n    return a + b\n```",
            [{"input": "x=y", "output": 3}, {"input": "text='x', a=5", "output": 6}],
            ENTRY,
            id="text with an equals sign",
        ),
    ],
)
def test_published_forms_of_tests_tell_right_programs_from_wrong_and_empty_ones(reward, right, tests, columns):
    texts = [right, right.replace("a + b", "a - b"), ""]
    assert reward([sample(text, **{"tests": tests, **columns}) for text in texts]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("# add(5, 2) == 7", "cannot fail"),
        ("[]", "cannot fail"),
        (CHECK, "needs the column entry_point"),
        (FUNCTIONAL, "needs? the column entry_point|give the example the column entry_point"),
        (f"{PYTEST}\nclass TestAdd:\n    def test_add(self, pair):\n        assert add(*pair)", "class of pytest"),
        ('{"test_cases": []}', "cannot fail"),
        ("It adds.", "not Python"),
        ([{"input": [5, 2], "output": 7}], "give the example the column entry_point"),
        ({"inputs": ["1 2"], "outputs": []}, "other outputs than one for each"),
        ("def test_add(pair):\n    assert add(*pair) == 7", "test_add takes arguments"),
        ([{"stdin": "1 2"}], "no input and output"),
        ([{"input": "1 2", "output": None}], "null"),
        ("import package_that_is_not_there\nassert add(5, 2) == 7", "ModuleNotFoundError.*reward.code.python"),
    ],
)
def test_tests_that_test_nothing_are_failures(reward, tests, reason):
    for result in reward([sample(text, tests=tests) for text in (ADD, SUBTRACT, "")][: 1 + ("cannot" in reason)]):
        assert isinstance(result, Failure)
        assert re.search(reason, result.reason)


def test_a_script_runs_anew_for_each_input(reward):
    """With its own standard input, its guard, its threads and its exit code."""
    script = (
        "import sys, threading\ndef main():\n    print(sum(map(int, open(0).read().split())))\n    sys.exit({code})\n"
    )
    script += "if __name__ == '__main__':\n    threading.Thread(target=main).start()"
    ends = "print(input().replace(' 2', ''))\nexit({code})"
    tests = [{"input": "1 2\n4", "output": "7"}, {"input": "1", "output": "1"}]
    assert reward([sample(script.format(code=0), tests=tests), sample("print(7)", tests=tests)]) == [1, 0]
    tests = [{"input": "1 2", "output": "1"}]
    assert reward([sample(ends.format(code=code), tests=tests) for code in (0, 1)]) == [1, 0]
    assert "it printed '2" in reward.explain(sample("print(2)", tests=tests))


@pytest.mark.parametrize(
    "text",
    [
        f"<think>hm</think><answer>\n{ADD[10:-4]}\n</answer>",
        f"<think>hm</think><answer>{ADD}</answer>",
        f"{ADD}\n<answer>see above</answer>",
    ],
)
def test_the_program_may_stand_in_an_answer_tag(reward, text):
    assert reward([sample(text)]) == [1]


@pytest.mark.parametrize(
    ("text", "before"),
    [
        (f"```python\n{PLAIN}```", ""),
        (f"I think\n```python\n{PLAIN}", ""),  # truncated before the code block ended
        ("    return a + b\n\nThis adds them.", "def add(a, b):\n"),
        (f"```python\n{PLAIN}```", 'def add(a, b):\n    """Add."""\n'),
        (f"```python\n{PLAIN}```\n```bash\npython add.py\n```", ""),
        (f"```python\n{PLAIN}```\nUsage:\n```python\nprint(add(1, 2))\n```", ""),
        ("```\nadd = lambda a, b: a + b\n```\n```python\nx = add(1, 2)\n```", ""),
        (f"~~~python\n{PLAIN}~~~", ""),
        (f"A `sum`: ```python\n{PLAIN}```\nThat is it.", ""),
        (f"1. **Code:** ```\n{PLAIN.replace('    ', '  ')}```\n```\n3\n```", ""),
        (f"I write in ``` fences\nand use ```add``` once\n{ADD}", ""),
        (f"```python\n{PLAIN[:-1]}```\nUsage:\n```\nadd(1, 2)```\n", ""),
        ("```python\n    return a + b\n```", "def add(a, b):\n"),
        (f'```python\nmark = \'```\'\nfence = """Use: ```\n"""\n{PLAIN}```', ""),
        (f"```python\n{PLAIN}``` Done.", ""),
        (f"```python\n{PLAIN}```\n```bash\nls\n```\n".replace("\n", "\r\n"), ""),
        (f"````{{.python}}\n{PLAIN}````", ""),
        ("- Code:\n  ```python\n  def add(a, b):\n      return a + b\n  ```\n- Done", ""),
        (f"```cpp\n{PLAIN}```", ""),  # the only block
        ("```python\n    def add(a, b):\n        return a + b\n```", ""),
        (f"{PLAIN}\\end{{code}}", ""),
        (f"{PLAIN}```", ""),
        ("> ```python\n> def add(a, b):\n>\n>     return a + b\n> ```", ""),
    ],
)
def test_the_program_is_found_in_a_completion(reward, text, before):
    assert reward([sample(text, before=before)]) == [1]


@pytest.mark.parametrize(
    "text",
    [
        f"{ADD}\nOr:\n{SUBTRACT}",
        f"{ADD}\nOr:\n```\n{SUBTRACT[10:]}",
        f"{SUBTRACT}\nOr:\n{PLAIN}",
        f"{ADD}\n{SUBTRACT}\n{ADD[:-3]}",
    ],
)
def test_of_two_programs_only_the_last_block_counts(reward, text):
    assert reward([sample(text)]) == [0]


def test_partial_scores_count_passed_tests():
    with closing(CodeReward(partial=True, right=2.0, wrong=-1.0, timeout=3)) as reward:
        assert reward([sample(ADD.replace("+", "*")), sample(ADD), sample("")]) == [0.5, 2.0, -1.0]


def test_columns_may_surround_the_program(reward):
    given = {"before": "def add(a, b):\n", "setup": "two = 2", "tests": "assert add(two, two) == 4"}
    assert reward([sample("    return a + b\n", **given)]) == [1]
    own = {"answer": "def max(a):\n    return 7", "tests": "assert max([]) == 7"}
    assert reward([sample("def max(a):\n    return 7", **own)]) == [1]


def test_another_interpreters_packages_can_be_imported():
    """Those of this environment cannot."""
    program = "import numpy\ndef add(a, b):\n    return int(numpy.add(a, b))"
    for python, expected in ((sys.executable, 1), (None, 0)):
        with closing(CodeReward(python=python, timeout=20, memory_mb=2048)) as reward:
            assert reward([sample(program)]) == [expected], reward.explain(sample(program))


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
    monkeypatch.setattr(backends, "available_backends", lambda python: [no_isolation(python)])
    monkeypatch.setattr(code, "working_backend", code.working_backend.__wrapped__)  # what a call has found stays
    with pytest.raises(ConfigError, match=r"no sandbox for programs works on this machine .*reward.code.unsafe=true"):
        CodeReward(memory_mb=256).check(["tests"])
    with closing(CodeReward(unsafe=True)) as reward:
        reward.check(["tests"])
        assert reward.warning.startswith("reward.code.unsafe=true: programs that the model writes run as you")
        assert reward([sample(ADD)]) == [1]


@pytest.mark.parametrize(
    ("field", "value"), [("timeout", 0), ("memory_mb", 8), ("processes", -1), ("disk_mb", 0), ("workers", -1)]
)
def test_invalid_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"reward.code.{field}={value}: "):
        CodeReward(**{field: value})
