"""Folders for trials, commands in separate processes, and finished runs to compare with or to damage."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.trial import PromiseBroken, Skipped, require

from grpocli.rollout.vllm.server_files import FOLDER, SHM, shared_memory_name

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds; a command that takes longer on a busy machine hangs
START = 600.0  # seconds, if vLLM starts first
GONE = 30.0  # seconds after a run's end in which its processes must end
PRELOAD = ["chaos.preload", "grpocli.cli", "grpocli.launch.trainer_process"]
TINY = [
    *("model.warm_start_steps=20", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.problems=0"),
    *("train.steps=4", "checkpoint.every=1"),
]
SMALL = [*TINY, "reward=[format]", "reward.format.pattern='.*[02468]'"]
"""A run of a few seconds. About half of all answers are even, so every step has groups with a training signal."""
UNREPEATABLE = ("time/", "memory/", "engine/", "stream/", "sync/seconds")
ERROR = "grpocli: error: "


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code of a command (None if it had to be killed) and its output."""

    code: int | None
    text: str

    @property
    def sentence(self) -> str:
        """The one error sentence of the output. Raises PromiseBroken if there is not exactly one, or a traceback."""
        self.check_readable()
        found = [line for line in self.text.splitlines() if line.startswith(ERROR)]
        require(len(found) == 1, f"it printed {len(found)} error sentences, with exit code {self.code}{self.tail}")
        return found[0].removeprefix(ERROR)

    def check_readable(self) -> None:
        """Raise PromiseBroken for a traceback, a logging error or a control character in the output."""
        require(self.code is not None, f"it hung{self.tail}")
        for sign in ("Traceback (most recent call last)", "--- Logging error ---", "Fatal Python error"):
            require(sign not in self.text, f"it printed {sign!r}, exit code {self.code}{self.tail}")
        control = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", self.text.replace("\r\n", "\n"))
        require(control is None, f"it printed a control character{self.tail}")

    def check(self, code: int, *words: str) -> None:
        """Raise PromiseBroken unless the exit code is `code` and, for an error, one sentence contains these words."""
        require(self.code == code, f"it ended with {self.code}, not {code}{self.tail}")
        if code not in (0, 3):
            sentence = self.sentence
            for word in words:
                require(word in sentence, f"the error does not name {word!r}: {sentence}")
        else:
            self.check_readable()

    @property
    def tail(self) -> str:
        return "\n      " + "\n      ".join(repr(line)[1:-1][:300] for line in self.text.splitlines()[-12:])


class Tree:
    """A process and its descendants, including those that were reparented after `look` saw them."""

    def __init__(self, pid: int) -> None:
        self.root, self.seen = pid, {pid: _started(pid)}

    def look(self) -> list[int]:
        """The living processes, in the order in which they were found."""
        parents = dict(_parents())
        more = True
        while more:
            new = [pid for pid, parent in parents.items() if parent in self.seen and pid not in self.seen]
            self.seen |= {pid: _started(pid) for pid in new}
            more = bool(new)
        return [pid for pid, start in self.seen.items() if start and pid in parents and _started(pid) == start]

    def memory(self) -> set[Path]:
        """Files in shared memory: weights, and queues and semaphores of vLLM's processes."""
        named = re.compile(rb"/dev/shm/(?:psm_[0-9a-f]+|" + FOLDER.encode() + rb"\w+)")
        texts = [read(pid, "maps") + read(pid, "environ") for pid in self.look()]
        found = {Path(os.fsdecode(name)) for text in texts for name in named.findall(text)}
        names = [shared_memory_name(path) for path in found if path.name.startswith(FOLDER)]
        return found.union(*(SHM.glob(pattern) for name in names for pattern in (f"{name}_*", f"sem.{name}-*")))

    def wait_gone(self) -> None:
        """Wait until all processes have ended. After `GONE` seconds, kill them and raise PromiseBroken."""
        deadline = time.monotonic() + GONE
        while left := self.look():
            if time.monotonic() > deadline:
                names = ", ".join(_name(pid) for pid in left)
                self.end()
                raise PromiseBroken(f"{len(left)} processes were left {GONE:g} s after the end: {names}")
            time.sleep(0.1)

    def end(self) -> None:
        for pid in self.look():
            _kill(pid, signal.SIGKILL)


class Command:
    """A running command and the tree of its processes."""

    def __init__(self, process: Any, log: Path) -> None:
        self._process, self.log = process, log
        self.tree = Tree(process.pid)

    @property
    def pid(self) -> int:
        return self.tree.root

    @property
    def code(self) -> int | None:
        """None while the command runs; minus the number of the signal that ended it."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        code: int | None = self._process.exitcode
        return code

    def wait_until(self, happened: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait for an event. False if the command ended, or `seconds` passed, before it."""
        deadline = time.monotonic() + seconds
        next_look = 0.0
        while not happened():
            now = time.monotonic()
            if self.code is not None or now > deadline:
                return happened()
            if now > next_look:
                self.tree.look()
                next_look = now + 0.3
            time.sleep(0.005)
        return True

    def wait(self, seconds: float = PATIENCE) -> CommandResult:
        """The result of the command, which is killed after `seconds`."""
        ended = self.wait_until(lambda: self.code is not None, seconds)
        if not ended:
            self.tree.end()
        code = self.code if ended else None
        text = self.log.read_bytes().decode(errors="replace")
        return CommandResult(code, text)


@dataclass(slots=True)
class Workspace:
    """The folder of one trial, and what all trials share, such as finished runs."""

    folder: Path
    shared: Shared

    def start(
        self,
        *argv: str,
        fresh: bool = False,
        env: Mapping[str, str] | None = None,
        memory_gb: float | None = None,
    ) -> Command:
        """Start `grpocli` with these arguments in this folder.

        fresh: in a new interpreter, as users do; otherwise in a fork of one that has imported everything.
        """
        log = self.folder / f"command_{len(list(self.folder.glob('command_*.log')))}.log"
        log.touch()
        variables = self.shared.environment | dict(env or {})
        if fresh:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "grpocli", *argv],
                    cwd=self.folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return self.shared.known(Command(process, log))
        return self._fork(log, variables, memory_gb, _command, list(argv))

    def _fork(
        self, log: Path, env: Mapping[str, str], memory_gb: float | None, function: Callable[..., object], *args: Any
    ) -> Command:
        values = (str(self.folder), dict(env), str(log), memory_gb, function, args)
        forked = self.shared.context.Process(target=_forked, args=values)
        forked.start()
        return self.shared.known(Command(forked, log))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The JSON result of a function in a separate process. Raises PromiseBroken if processes of it stay."""
        log, answer = self.folder / "call.log", self.folder / "answer.json"
        log.touch()
        command = self._fork(log, self.shared.environment, None, _answer, str(answer), function, args)
        ended = command.wait()
        command.tree.wait_gone()
        require(answer.exists(), f"it ended with {ended.code}{ended.tail}")
        return json.loads(answer.read_text())

    def run(self, *argv: str, seconds: float = PATIENCE, **more: Any) -> CommandResult:
        """Start `grpocli` and wait until it and its descendants have ended."""
        command = self.start(*argv, **more)
        ended = command.wait(seconds)
        command.tree.wait_gone()
        return ended

    def finished(self, *options: str, small: Sequence[str] = SMALL) -> Path:
        """An undisturbed run with these options."""
        return self.shared.finished([*small, *options])

    def copy(self, run: Path) -> Path:
        """A copy of a run in this trial's folder, to resume or to damage."""
        return Path(shutil.copytree(run, self.folder / "run"))


@dataclass
class Shared:
    """What trials share: a folder, the environment of commands, finished runs and servers."""

    folder: Path
    environment: dict[str, str] = field(init=False)
    context: Any = field(init=False)
    _runs: dict[str, Path] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _commands: list[Command] = field(default_factory=list)
    _closing: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = {
            "GRPOCLI_CACHE": os.environ.get("GRPOCLI_CACHE", str(self.folder / "cache")),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": f"{ROOT / 'bench'}{os.pathsep}{ROOT / 'tests'}",
            "COLUMNS": "200",
        }
        self.environment = {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"} | own
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    @contextmanager
    def workspace(self, name: str) -> Iterator[Workspace]:
        """A workspace for one trial. Its folder remains if the trial fails."""
        folder = self.folder / name.replace(":", "_")
        folder.mkdir(parents=True)
        try:
            yield Workspace(folder, self)
        except Skipped:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)

    def once(self, name: str, make: Callable[[], Path]) -> Path:
        """A folder that the first trial makes; the others wait for it."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._runs:
                self._runs[name] = make()
        return self._runs[name]

    def finished(self, options: Sequence[str]) -> Path:
        def make() -> Path:
            folder = Path(tempfile.mkdtemp(prefix="finished_", dir=self.folder))
            workspace = Workspace(folder, self)
            ended = workspace.run("train", *options, f"hydra.run.dir={folder}/run", seconds=START)
            ended.check(0)
            return folder / "run"

        return self.once(" ".join(options), make)

    def known(self, command: Command) -> Command:
        self._commands = [one for one in self._commands if one.code is None] + [command]
        return command

    def end(self) -> None:
        """Kill all running commands."""
        for command in self._commands:
            command.tree.end()

    def at_end(self, close: Callable[[], None]) -> None:
        self._closing.append(close)

    def close(self) -> None:
        for close in self._closing:
            close()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without times; empty if the run ended before its first step."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(UNREPEATABLE)} for row in rows]


def check_equal(run: Path, expected: Path) -> None:
    """Raise PromiseBroken unless both runs have the same metrics and the same final model, to the bit."""
    ours, theirs = metrics(run), metrics(expected)
    steps = [row["step"] for row in ours]
    require(steps == [row["step"] for row in theirs], f"the steps are {steps}")
    for row, other in zip(ours, theirs, strict=True):
        names = sorted(name for name in row.keys() | other.keys() if repr(row.get(name)) != repr(other.get(name)))
        require(not names, f"step {row['step']} differs in: {', '.join(names[:8])}")
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, expected)]
    require(models[0] == models[1], "the final model differs")


def require_root() -> None:
    """Raise Skipped for other users than root."""
    if os.geteuid() != 0:
        raise Skipped("needs root")


def require_module(module: str) -> None:
    """Raise Skipped if a module is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise Skipped(f"{module} is not installed")


def _forked(
    folder: str,
    env: dict[str, str],
    log: str,
    memory_gb: float | None,
    function: Callable[..., object],
    args: Sequence[Any],
) -> None:
    """Run a function in this forked process, with its output in a log."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    if memory_gb:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gb * 2**30),) * 2)
    function(*args)


def _command(argv: list[str]) -> None:
    """The same as `python -m grpocli`."""
    from grpocli.cli import main

    sys.argv = ["grpocli", *argv]
    main()


def _answer(path: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    answer = function(*args)
    Path(path).write_text(json.dumps(answer))


def _parents() -> Iterator[tuple[int, int]]:
    for path in os.listdir("/proc"):  # noqa: PTH208  called often
        if path.isdigit():
            fields = read(int(path), "stat").rpartition(b")")[2].split()
            if fields and fields[0] not in (b"Z", b"X"):
                yield int(path), int(fields[1])


def _started(pid: int) -> str:
    """The start time, which distinguishes processes with the same pid; empty if the process has ended."""
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return fields[19].decode() if fields and fields[0] not in (b"Z", b"X") else ""


def _name(pid: int) -> str:
    return read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:60].strip() or str(pid)


def read(pid: int, name: str) -> bytes:
    """A file in a process's folder of /proc; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
