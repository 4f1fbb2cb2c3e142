"""Results of programs and their tests in the sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from grpocli.sandbox import cgroup
from grpocli.sandbox.sandbox import SandboxError

pytestmark = pytest.mark.processes

ADD = "def add(a, b):\n    return a + b\n"


def test_each_test_has_a_result(sandbox):
    result = sandbox(ADD, "assert add(1, 2) == 3", "assert add(1, 2) == 4, 'four'", "assert add('a', 'b') == 'ab'")
    assert result.passed == [True, False, True]
    assert result.error == "AssertionError: four"


@pytest.mark.parametrize(
    "value",
    [
        "None", "True", "-7", "10**5000", "1.5", "float('inf')", "'a\\ud800é'", "b'ab'", "2 + 3j", "[1, [2, (3,)]]",
        "{1, 2}", "frozenset({1})", "{'a': {1: (2, None)}}", "__import__('collections').Counter('aab')",
    ],
)  # fmt: skip
def test_plain_values_survive_a_round_trip(sandbox, value):
    program = "def same(x):\n    return x\n"
    kind = "dict" if "Counter" in value else "type(x)"
    assert sandbox(program, f"x = {value}\nassert same(x) == x\nassert type(same(x)) is {kind}").passed == [True]


def test_objects_of_the_programs_classes_work_in_the_tests(sandbox):
    program = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)

def largest(stack): return max(stack.items)

def squares(n):
    for i in range(n):
        yield i * i
"""
    test = """
stack = Stack()
stack.push(3); stack.push(5)
assert len(stack) == 2 and largest(stack) == 5 and stack.pop() == 5
assert list(squares(4)) == [0, 1, 4, 9]
numbers = squares(2)
assert (next(numbers), next(numbers), next(numbers, 'over')) == (0, 1, 'over')
"""
    assert sandbox(program, test).passed == [True]


def test_exceptions_of_the_program_reach_the_tests(sandbox):
    program = "class Mine(ValueError): pass\ndef f(): raise Mine('no')\n"
    test = "try:\n    f()\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"
    result = sandbox(program, test, "f()")
    assert result.passed == [True, False]
    assert result.error == "ValueError: no"


def test_tests_may_use_the_programs_imports(sandbox):
    program = "import math\nfrom collections import deque\ndef half(x):\n    return x / 2\n"
    assert sandbox(program, "assert math.isclose(half(3), 1.5)").passed == [True]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"setup": "import nothing_of_that_name"}, "ModuleNotFoundError"),
        ({"setup": "def"}, "SyntaxError"),
        ({"reference": "1 / 0", "entry_point": "add"}, "ZeroDivisionError"),
        ({"reference": "while True: pass", "entry_point": "add"}, "took longer than 3 s"),
    ],
)
def test_a_broken_example_raises_an_error(sandbox, given, reason):
    with pytest.raises(SandboxError, match=reason):
        sandbox(ADD, "assert add(1, 1) == 2", **given)
    with pytest.raises(SandboxError, match="its tests cannot be run: SyntaxError"):
        sandbox(ADD, "assert add(1, 1) = 2")


def test_tests_see_the_arguments_that_a_function_without_a_result_changes(sandbox):
    program = """
class Node: pass

def f(a, b, c, d=None):
    a[0].append(1); b["x"] = a; c.discard(1); d and d.append(Node())

def empty(a):
    a.clear()
    return []
"""
    test = "a, b, c, d = [[0]], {}, {1, 2}, [3]\nf(a, b, c, d=d)\nassert (a, b, c) == ([[0, 1]], {'x': [[0, 1]]}, {2})"
    sort = "a = [2, 1]\nassert empty(a) == sorted(a)"
    assert sandbox(program, f"{test}\nassert len(d) == 2", sort, "f([0], 1, 2)").passed == [True, False, False]


def test_attributes_that_tests_set_are_set_in_the_program(sandbox):
    program = """
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def me(self): return self

def length(node): return 1 + length(node.next) if node else 0

class Fixed:
    __slots__ = ("x",)
"""
    test = "a, b = Node(1), Node(2)\na.next = b\nassert length(a) == 2 and a.next == b and a.me() == a and a != b"
    result = sandbox(program, test, "Fixed().y = 5")
    assert result.passed == [True, False]
    assert result.error.startswith("AttributeError")


def test_a_program_may_define_a_built_in_name_that_the_reference_defines(sandbox):
    program = "def sum(a, b):\n    return a + b\n"
    assert sandbox(program, "assert sum(1, 2) == 3", reference=program).passed == [True]
    assert sandbox(program, "assert sum(1, 2) == 3").passed == [False]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def add(a, b)\n    return a + b", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
        ("1 / 0", "ZeroDivisionError"),
        ("x" * 100_000 + "(" * 5000, "SyntaxError"),
        ("def add(a, b):\n    return add(a, b)", "RecursionError"),
        ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", "RecursionError"),
        ("def add(a, b):\n    return 'x' * (20 * 2**20)", "a message that is too long"),
    ],
)
def test_a_broken_program_fails_its_tests(sandbox, program, reason):
    result = sandbox(program, "assert add(1, 2) == 3")
    assert result.passed == [False]
    assert reason in result.error


SPIN = """
import os, time

def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
    return 1

def together(n, action):
    children = []
    for _ in range(n):
        if (child := os.fork()) == 0:
            action()
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]

def spin_together(n, seconds):
    return together(n, lambda: spin(seconds))

def fill_together(n, size):
    def fill():
        filled = b"x" * size
        time.sleep(0.5)
    return together(n, fill)
"""


@pytest.fixture
def one_busy_core() -> Iterator[None]:
    """All processes of the test share a quarter of a core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    yield
    os.sched_setaffinity(0, cores)
    for other in others:
        other.kill()
        other.wait()


def test_a_right_program_passes_on_a_busy_machine(sandbox, one_busy_core):
    sandbox.limits = replace(sandbox.limits, timeout=1)
    assert sandbox(SPIN, "assert spin(0.6) == 1").passed == [True]
    assert sandbox(SPIN, "assert spin(1.6) == 1").error == "it took longer than 1 s"


def test_processes_of_a_program_share_its_time_limit(sandbox):
    sandbox.limits = replace(sandbox.limits, timeout=1)
    assert sandbox(SPIN, "assert spin_together(4, 0.45) == [0] * 4").error == "it took longer than 1 s"


def test_processes_of_a_program_share_its_memory_limit(sandbox):
    if not cgroup.parent_group():
        pytest.skip("control groups cannot be had here")
    size = sandbox.limits.memory_mb * 2**20 // 2
    tests = [f"assert fill_together(1, {size}) == [0]", f"assert 9 in fill_together(4, {size})"]
    assert sandbox(SPIN, *tests).passed == [True, True]
    assert not list(cgroup.parent_group().glob(f"grpocli-sandbox-{os.getpid()}-*"))


def test_the_parent_control_group_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    (tmp_path / "own").write_text("5:cpu:/a\n4:memory:/a/b\n0::/user/run.scope\n")
    (tmp_path / "user").mkdir()
    where = ["memory/a/b", "memory/a", "user/run.scope", "user"]
    assert cgroup._candidates() == [tmp_path / path for path in where]
    assert cgroup.parent_group.__wrapped__() is None  # a folder that is not a control group
    assert list((tmp_path / "user").iterdir()) == []


def test_each_input_of_a_script_has_the_time_limit(sandbox):
    sandbox.limits = replace(sandbox.limits, timeout=1)
    program = "import time\nwanted = input()\ntime.sleep(float(wanted))\nprint(wanted)"
    assert sandbox(program, *[("0.4", "0.4")] * 4).passed == [True] * 4
    result = sandbox(program, ("0.4", "0.4"), ("60", "60"), ("0", "0"))
    assert (result.passed, result.error) == ([True, False, False], "it took longer than 1 s")


def test_tests_after_one_that_ends_the_program_fail(sandbox):
    program = "import os\ndef f(n):\n    if n == 1: os._exit(1)\n    return n\n"
    result = sandbox(program, *(f"assert f({n}) == {n}" for n in (0, 1, 2)))
    assert result.passed == [True, False, False]
    assert result.error.startswith("Closed: the program gave no answer")


def test_a_different_value_is_wrong(sandbox):
    assert sandbox("def f():\n    return (1, 2)", "assert f() == [1, 2]", "assert f() == (1, 2)").passed == [
        False,
        True,
    ]


def test_tests_may_use_keyword_arguments(sandbox):
    program = "def f(what, self=1, function=2):\n    return (what, self, function)\n"
    assert sandbox(program, "assert f(what=3, self=4, function=5) == (3, 4, 5)").passed == [True]
