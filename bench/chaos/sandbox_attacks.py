"""Attacks on the sandbox: programs that try to escape, to stay, to take too much, or to fake a pass.

Each backend is attacked separately. After a probe, which returns whether it got through, a control shows that the
sandbox still runs programs.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.trial import Kind, Skipped, require, spread
from chaos.workspace import Workspace
from sandbox.test_escapes import FORGED

BACKENDS = ("bubblewrap", "namespaces")
PER_BACKEND = 75
TIMEOUT, MEMORY_MB, PROCESSES, DISK_MB = 3.0, 256, 4, 4
SECRET = "{secret}"
"""Placeholder in a program for the path of a secret file outside the sandbox."""

EXISTS = "import os\ndef attack(path):\n    return os.path.exists(path)\n"
WRITE = """
def attack(folder):
    try:
        with open(f"{folder}/left", "wb") as file:
            return file.write(bytes(65536))
    except OSError:
        return 0
"""
CONNECT = """
import socket
def attack(kind, port):
    try:
        with socket.socket(getattr(socket, kind), socket.SOCK_STREAM) as s:
            s.settimeout(1)
            s.connect(("127.0.0.1", port))
        return True
    except PermissionError:
        return False
"""
CALL = """
import ctypes
def attack(number, *args):
    return ctypes.CDLL(None, use_errno=True).syscall(number, *args) >= 0
"""
KILL = """
import os
def attack(pid):
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False
"""
FILES = [
    *("/etc/shadow", "/etc/passwd", "/etc/hosts", "/etc/ssl", "/proc/1/environ", "/proc/self/maps", "/proc/kcore"),
    *("/sys/kernel", "/sys/fs/cgroup", "/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/var/log", "/boot"),
    *(SECRET, f"/proc/self/root{SECRET}", f"/tmp/../{SECRET}"),
]
FOLDERS = ["/", "/dev", "/usr", "/var/tmp", "/dev/shm", "/run", "/lib"]
FAMILIES = ["AF_INET", "AF_INET6", "AF_UNIX", "AF_VSOCK", "AF_NETLINK"]
CALLS = {  # of x86-64
    "ptrace": "101, 16, 1, 0, 0",
    "unshare": "272, 0x10000000",
    "mount": "165, b'tmpfs', b'/tmp', b'tmpfs', 0, None",
    "umount": "166, b'/tmp', 2",
    "pivot_root": "155, b'/', b'/tmp'",
    "chroot": "161, b'/tmp'",
    "shmget": "29, 0, 4096, 0o1777",
    "msgget": "68, 0, 0o1777",
    "memfd_create": "319, b'x', 0",
    "bpf": "321, 0, 0, 0",
    "perf_event_open": "298, 0, 0, -1, -1, 0",
    "userfaultfd": "323, 0",
    "io_uring_setup": "425, 1, bytes(120)",
    "add_key": "248, b'user', b'x', b'x', 1, -3",
    "init_module": "175, 0, 0, b''",
    "open_by_handle_at": "304, 3, bytes(8), 0",
    "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
    "sethostname": "170, b'x', 1",
    "settimeofday": "164, bytes(16), 0",
    "setns": "308, 0, 0",
}
HARMLESS = ("process_vm_readv",)  # may succeed with nothing to read
GRABS = {
    "one block": "bytearray(2**30)",
    "many blocks": "[bytearray(10**7) for _ in range(1000)]",
    "a mapping": "__import__('mmap').mmap(-1, 2**30)",
    "a text": "'x' * 2**30",
    "a number": "1 << 2**34",
}
TOGETHER = """
import os, time
def attack():
    for _ in range(3):
        if os.fork() == 0:
            block = bytearray(b"x" * (200 * 2**20))
            time.sleep(20)
            os._exit(0)
    block = bytearray(b"x" * (200 * 2**20))
    time.sleep(1)
    return True
"""
HANGS = {
    "a loop": "while True: pass",
    "a loop when it is asked": "def attack():\n    while True: pass",
    "ignored signals": (
        "import signal, time\nfor n in range(1, 9):\n    signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(60)"
    ),
    "a regex": "import re\ndef attack():\n    return re.match('(a+)+$', 'a' * 60 + 'b')",
    "a power": "def attack():\n    return 7 ** 7 ** 9 and False",
    "sleep": "import time\ndef attack():\n    time.sleep(600)",
    "an error without end": "class Slow(Exception):\n    def __str__(self):\n        while True: pass\n"
    "def attack(): raise Slow",
}
STAYS = {
    "a child": "import os, time\ndef attack():\n    if os.fork() == 0:\n        os.setsid()\n"
    "        if os.fork() == 0:\n            time.sleep(600)\n        os._exit(0)\n    return False",
    "untied": "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ndef attack():\n    time.sleep(600)",
    "untied child": "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nif os.fork() == 0:\n"
    "    os.setsid()\n    time.sleep(600)\ndef attack(): return False",
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    "def attack(): return False",
    "a bomb": "import os\ndef attack():\n    while True:\n        try:\n            os.fork()\n"
    "        except OSError:\n            pass",
}
PRINTS = {
    "out": "while True: print('x' * 1000)",
    "err": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "an error": "def attack(): raise ValueError('x' * 10**8)",
}
LIES = FORGED | {
    "at its end": "import atexit, os\natexit.register(os._exit, 0)\ndef answer(): raise SystemExit(0)",
    "a text that is equal": (
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def answer(): return Any('0')"
    ),
    "by tracing": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\ndef answer(): return 0",
    "by what is collected": (
        "import gc\nfor found in gc.get_objects():\n    if isinstance(found, dict) and 'passed' in found:\n"
        "        found['passed'] = True\ndef answer(): return 0"
    ),
    "a result with its own way to be sent": (
        "class Sent:\n    def __reduce__(self): return (int, (42,))\n    def __index__(self): return 42\n"
        "    __int__ = __index__\ndef answer(): return Sent()"
    ),
}
"""Programs whose `answer()` is not 42, but which try to pass a test for 42."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A program and a test that passes if the attack succeeds. probe: a control follows."""

    backend: str
    name: str
    program: str
    test: str
    probe: bool = False

    attacks = 1

    def __str__(self) -> str:
        return f"{self.backend}: {self.name}"

    def execute(self, workspace: Workspace) -> None:
        _needs(self.backend)
        if self.program == TOGETHER and not os.access("/sys/fs/cgroup", os.W_OK):
            raise Skipped("cgroups are not writable")
        answer = workspace.call(run_attack, self.backend, self.program, self.test, self.probe)
        if "skipped" in answer:
            raise Skipped(str(answer["skipped"]))
        expected = [False, True] if self.probe else [False]
        require(answer["passed"] == expected, f"the tests gave {answer['passed']}, not {expected}: {answer}")
        require(len(answer["printed"]) <= 4096, f"{len(answer['printed'])} characters of its output were kept")


@dataclass(frozen=True, slots=True)
class CorrectProgram:
    """A correct program that must pass despite the machine's load or another test that hangs."""

    backend: str
    how: str

    attacks = 1

    def __str__(self) -> str:
        return f"{self.backend}: a correct program {self.how}"

    def execute(self, workspace: Workspace) -> None:
        _needs(self.backend)
        if self.how == "beside busy loops":
            program = "import time\ndef answer():\n    while time.process_time() < 0.8:\n        pass\n    return 42\n"
            loops = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))
            ]
            try:
                answer = workspace.call(run_attack, self.backend, program, "assert answer() == 42", False)
            finally:
                for loop in loops:
                    loop.kill()
                    loop.wait()
            require(answer.get("passed") == [True], f"it did not pass: {answer}")
            return
        program = "def f(x):\n    while x == 2: pass\n    return x\n"
        tests = "\0".join(f"assert f({x}) == {x}" for x in (1, 2, 3))
        answer = workspace.call(run_attack, self.backend, program, tests, False)
        require(answer.get("passed") == [True, False, False], f"the tests gave {answer}")


def run_attack(backend: str, program: str, test: str, probe: bool) -> dict[str, object]:
    """The result as JSON values. Runs in its own process."""
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import Limits, SandboxError, Submission, run

    limits = Limits(timeout=TIMEOUT, memory_mb=MEMORY_MB, processes=PROCESSES, disk_mb=DISK_MB)
    try:
        chosen = backend_named(backend, None)
    except SandboxError as error:
        return {"skipped": str(error)}
    with tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix="secret") as secret, _listening() as port:
        secret.write("secret")
        secret.flush()
        filled = [text.replace(SECRET, secret.name).replace("{port}", str(port)) for text in (program, test)]
        filled[1] = filled[1].replace("{pid}", str(os.getpid()))
        tests = filled[1].split("\0")
        program = filled[0] + "\ndef control(): return 1\n" * probe
        try:
            result = run(Submission(program, tests), limits, chosen)
            controls = run(Submission(program, ["assert control() == 1"] * probe), limits, chosen).passed
        except SandboxError as error:
            return {"passed": None, "printed": "", "wrong": f"SandboxError: {error}"}
    return {"passed": [*result.passed, *controls], "printed": result.printed, "wrong": result.error[:300]}


class _listening:
    """A local port that accepts connections."""

    def __enter__(self) -> int:
        self.server = socket.create_server(("127.0.0.1", 0))
        return int(self.server.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self.server.close()


def _needs(backend: str) -> None:
    """Raise Skipped if this backend is not installed."""
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        raise Skipped("bubblewrap is not installed")


def cases(backend: str) -> list[Attack]:
    def probe(name: str, program: str, test: str) -> Attack:
        return Attack(backend, name, program, f"assert {test}", probe=True)

    def whole(name: str, program: str) -> Attack:
        return Attack(backend, name, program, "assert attack()")

    found = [probe(f"sees {path}", EXISTS, f"attack({path!r})") for path in FILES]
    found += [probe(f"writes to {folder}", WRITE, f"attack({folder!r})") for folder in FOLDERS]
    found += [probe(f"a socket of {kind}", CONNECT, f"attack({kind!r}, {{port}})") for kind in FAMILIES]
    found += [probe(f"calls {name}", CALL, f"attack({args})") for name, args in CALLS.items() if name not in HARMLESS]
    found += [probe(f"signals {who}", KILL, f"attack({who})") for who in ("{pid}", "3", "4")]
    found += [whole(f"grabs memory: {name}", f"def attack():\n    return {grab}\n") for name, grab in GRABS.items()]
    found.append(whole("grabs memory with its children", TOGETHER))
    found += [whole(f"hangs: {name}", program) for name, program in HANGS.items()]
    found += [whole(f"stays: {name}", program) for name, program in STAYS.items()]
    found += [whole(f"prints without end: {name}", program) for name, program in PRINTS.items()]
    found += [Attack(backend, f"lies: {name}", program, "assert answer() == 42") for name, program in LIES.items()]
    return found


def draw(random: Random, count: int) -> Sequence[Attack | CorrectProgram]:
    trials: list[list[Attack | CorrectProgram]] = []
    for backend in BACKENDS:
        right = [CorrectProgram(backend, how) for how in ("beside busy loops", "that hangs in one of its tests")]
        trials.append([*spread(random, cases(backend), count // len(BACKENDS) - len(right)), *right])
    return [one for both in zip(*trials, strict=True) for one in both]


KIND = Kind("sandbox", PER_BACKEND * len(BACKENDS), draw)
