"""Programs that try to escape, to outlive the sandbox, to exceed limits, or to forge their results."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from grpocli.sandbox import backends
from grpocli.sandbox.backends import interpreter, no_isolation
from grpocli.sandbox.sandbox import Backend, Limits, SandboxError

pytestmark = pytest.mark.processes

TEST = "assert answer() == 42"
RIGHT = "def answer():\n    return 42\n"


def others() -> set[int]:
    """Processes of sandboxes on this machine."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"from inside.main import main" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def nothing_is_left():
    before = others()
    yield
    left = others() - before  # includes those of concurrent tests, which end soon
    deadline = time.monotonic() + 20
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= others()
    assert not left


def test_a_fork_bomb_is_stopped(sandbox, nothing_is_left):
    program = """
import os, time
count = 0
def bomb():
    global count
    while True:
        try:
            if os.fork() == 0:
                time.sleep(0.2)  # until the limit is reached
                while True:
                    try:
                        os.fork()
                    except OSError:
                        pass
            count += 1
        except OSError:
            return count
"""
    result = sandbox(program, f"assert bomb() == {sandbox.limits.processes}")
    assert result.passed == [True]


def test_background_processes_end_with_the_program(sandbox, nothing_is_left):
    program = """
import os, time
def answer():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return 42
"""
    assert sandbox(program, TEST).passed == [True]


UNTIED = "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"  # undoes PR_SET_PDEATHSIG


@pytest.mark.parametrize(
    "program",
    [
        UNTIED + "def answer():\n    time.sleep(60)",
        UNTIED + "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ndef answer(): return 42",
    ],
)
def test_a_program_that_undoes_die_with_parent_still_ends(sandbox, program, nothing_is_left):
    sandbox.limits = replace(sandbox.limits, timeout=0.5)
    sandbox(program, TEST)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal, time\nfor n in range(1, 9):\n    signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(60)",
        "def answer():\n    while True: pass",
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\ndef answer(): raise Slow",
    ],
)
def test_the_time_limit_ends_a_program(sandbox, program, nothing_is_left):
    sandbox.limits = replace(sandbox.limits, timeout=0.5)
    start = time.monotonic()
    result = sandbox(program, TEST, "assert True")
    assert time.monotonic() - start < 10
    assert result.passed == [False, False]
    assert result.error == "it took longer than 0.5 s"


def test_the_disk_limit_is_enforced(sandbox):
    program = """
import os
def fill(folder):
    written = 0
    try:
        for i in range(1000):
            with open(f"{folder}/{i}", "wb") as file:
                for _ in range(16):
                    written += file.write(bytes(65536))
    except OSError:
        pass
    return written
"""
    tests = ["assert 2**20 <= fill('/tmp') <= 4 * 2**20"]
    tests += [f"assert fill({folder!r}) == 0" for folder in ("/", "/dev", "/usr", "/var/tmp", "/dev/shm", "/run")]
    assert sandbox(program, *tests).passed == [True] * 7


def test_endless_output_is_cut(sandbox):
    result = sandbox("while True: print('x' * 1000)", TEST)
    assert result.passed == [False]
    assert len(result.printed) <= 4096


@pytest.mark.parametrize(
    "grab",
    [
        "bytearray(2**30)",
        "[bytearray(10**7) for _ in range(1000)]",
        "__import__('mmap').mmap(-1, 2**30)",
        "'x' * 2**30",
    ],
)
def test_the_memory_limit_is_enforced(sandbox, grab):
    result = sandbox(f"def grab():\n    return {grab}\n", "grab()")
    assert result.passed == [False]
    assert "Error" in result.error


def test_files_of_the_machine_are_hidden(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with tempfile.NamedTemporaryFile("w", dir=Path.home()) as home:
        home.write("secret")
        home.flush()
        paths = [
            "/etc/shadow",
            "/etc/passwd",
            str(secret),
            home.name,
            "/proc/1/environ",
            "/proc/self/maps",
            "/sys/kernel",
        ]
        program = "import os\ndef there(path):\n    return os.path.exists(path)\n"
        result = sandbox(program, *(f"assert not there({path!r})" for path in paths))
    assert result.passed == [True] * len(paths)


def test_environment_variables_are_hidden(sandbox, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    program = "import os\ndef names():\n    return sorted(os.environ)\n"
    assert sandbox(program, "assert 'OPENAI_API_KEY' not in names() and 'PATH' in names()").passed == [True]


@pytest.mark.parametrize("kind", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_VSOCK", "AF_NETLINK"])
def test_sockets_are_refused(sandbox, kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            "import socket\ndef reach():\n"
            f"    with socket.socket(socket.{kind}, socket.SOCK_STREAM) as s:\n"
            f"        s.connect(('127.0.0.1', {server.getsockname()[1]}))\n"
        )
        assert "PermissionError" in sandbox(program, "reach()").error


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",
        "mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
        "shmget(0, 4096, 0o1777)",
        "memfd_create(b'x', 0)",
    ],
)
def test_dangerous_system_calls_are_refused(sandbox, call):
    program = f"import ctypes\ndef call():\n    return ctypes.CDLL(None, use_errno=True).{call}\n"
    assert sandbox(program, "assert call() == -1").passed == [True]


def test_other_processes_cannot_be_signalled(sandbox):
    program = f"""
import os, signal
def ended():
    found = []
    for pid in {[os.getpid(), os.getppid(), 3, 4, 5]}:
        try:
            os.kill(pid, 0)
            found.append(pid)
        except OSError:
            pass
    return found
"""
    assert sandbox(program, "assert ended() == []").passed == [True]


FORGED = {
    "printing": "print('passed\\n\\n\\n')\ndef answer(): return 0",
    "leaving": "import sys\ndef answer(): sys.exit(0)",
    "leaving at once": "import os\nos._exit(0)",
    "leaving when asked": "import os\ndef answer(): os._exit(0)",
    "writing to every file": (
        "import os\nfor fd in range(64):\n    for text in (b'\\n', b'true\\n', b'passed\\n'):\n"
        "        try: os.write(fd, text)\n        except OSError: pass\ndef answer(): return 0"
    ),
    "being equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "def answer(): return Any()"
    ),
    "a number that is equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef answer(): return Any(0)"
    ),
    "changing what is built in": (
        "import builtins\nbuiltins.AssertionError = type('No', (BaseException,), {})\n"
        "builtins.exec = builtins.compile = lambda *_: None\ndef answer(): return 0"
    ),
    "changing the harness": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('inside'):\n"
        "        for key in list(vars(module)):\n            if key in ('encode', '_problem', 'run'):\n"
        "                setattr(module, key, lambda *_: b'')\ndef answer(): return 0"
    ),
    "ending the tests": "def answer(): raise StopIteration",
    "hiding in a name of the tests": "AssertionError = Exception\nanswer = None",
}


@pytest.mark.parametrize("how", FORGED)
def test_results_cannot_be_forged(sandbox, how):
    assert sandbox(FORGED[how], TEST).passed == [False]


def test_a_program_cannot_replace_built_in_functions_of_the_tests(sandbox):
    program = "def abs(x): return 0\ndef isinstance(*_): return True\ndef all(_): return True\ndef answer(): return 0"
    assert sandbox(program, "assert abs(answer() - 42) < 1e-6").passed == [False]


def test_a_program_cannot_replace_modules_of_the_tests(sandbox):
    program = "class math:\n    isclose = lambda *_: True\ndef isclose(*_): return True\ndef answer(): return 0"
    assert sandbox(program, "assert math.isclose(answer(), 42)").passed == [False]
    reference = "from math import isclose\nimport math as m\n" + RIGHT
    tests = ["assert isclose(answer(), 42)", "assert m.isclose(answer(), 42)"]
    assert sandbox(program, *tests, reference=reference).passed == [False, False]
    assert sandbox(RIGHT, *tests, reference=reference).passed == [True, True]


def test_helper_functions_of_the_tests_are_the_references(sandbox):
    before = "def error(x):\n    return abs(x - 42)\n\n"
    program = "def error(x): return 0\ndef answer(): return 0"
    check = "def check(f):\n    assert error(f()) == 0\n\ncheck(answer)"
    given = {"reference": before + RIGHT, "entry_point": "answer"}
    assert sandbox(before + program, check, **given).passed == [False]
    assert sandbox(before + RIGHT, check, **given).passed == [True]


def test_a_program_cannot_send_builtins(sandbox):
    """A program may find the socket and write to it."""
    program = """
import os, sys
for module in list(sys.modules.values()):
    if module.__name__ == "inside.protocol":
        def keep(one):
            return (0, "x")
        def lie(*_):
            return 0
        forged = {"modules": {}, "values": {"__builtins__": {"abs": lie, "print": 1}, "answer": 0, "abs": lie}}
        message = module.encode(("value", forged), keep)
        for fd in range(3, 64):
            try:
                os.write(fd, b"%d\\n%s" % (len(message), message))
            except OSError:
                pass
"""
    assert sandbox(program, "assert abs(answer - 42) < 1").passed == [False]
    assert sandbox(program, "assert answer == 0 and abs(-1) == 1").passed == [True]


@pytest.mark.parametrize("program", ["", "x = 1", "del answer", "answer: int"])
def test_the_reference_is_not_tested_in_place_of_the_program(sandbox, program):
    before = 'def answer():\n    """42."""\n'
    assert sandbox(before + program, TEST, reference=f"{before}    return 42\n", entry_point="answer").passed == [False]
    assert sandbox(program, TEST, reference=RIGHT, entry_point="answer").passed == [False]


def test_a_program_cannot_end_a_loop_of_the_tests(sandbox):
    program = "def f(x): raise StopIteration"
    result = sandbox(program, "for x, y in zip(map(f, [1, 2]), [1, 2]):\n    assert x == y")
    assert result.passed == [False]


def test_a_missing_backend_is_not_replaced_by_no_isolation(monkeypatch):
    monkeypatch.setattr(backends, "available_backends", lambda python: [])
    with pytest.raises(SandboxError, match="bubblewrap was available when the run began"):
        backends.backend_named("bubblewrap", None)


def test_no_backend_is_selected_if_a_program_can_escape(monkeypatch):
    """Resource limits alone are not a sandbox."""
    monkeypatch.setattr(backends, "available_backends", lambda python: [no_isolation(python)])
    with pytest.raises(SandboxError, match=r"none: a program in it can .*reach a port of this machine"):
        backends.select_backend(None, Limits(memory_mb=256))


def test_a_sandbox_that_does_not_start_raises_an_error(backend, sandbox):
    order = {**backend.order, "namespaces": True, "readable": ["/" + "x" * 300]}
    sandbox.backend = Backend("broken", interpreter(None), lambda _: ["/bin/false"], order)
    with pytest.raises(SandboxError, match="ended at once"):
        sandbox(RIGHT, TEST)
    sandbox.backend = Backend("missing", interpreter(None), lambda _: ["/no/such/program"], order)
    with pytest.raises(SandboxError, match="/no/such/program"):
        sandbox(RIGHT, TEST)


def test_the_error_has_the_output_of_a_failed_start(sandbox):
    refuse = ["/bin/sh", "-c", 'echo "no namespaces here" >&2; exit 1', "--"]
    sandbox.backend = Backend("refused", interpreter(None), lambda _: refuse, sandbox.backend.order)
    with pytest.raises(SandboxError, match="no namespaces here"):
        sandbox(RIGHT, TEST)
