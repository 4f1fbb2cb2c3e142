"""Where trials are made: folders, commands in processes of their own, finished runs to compare with or to damage."""

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

from chaos.trial import LeftOut, Lost, demand

from grpocli.rollout.vllm.server_files import PREFIX, SHM, shared_memory_name

TESTS = Path(__file__).parents[1]
PATIENCE = 240.0  # seconds for a command on a busy machine: one that takes longer hangs
START = 600.0  # where vLLM must start first
GONE = 30.0  # seconds in which what a run has started must have ended after it
PRELOAD = ["chaos.preload", "grpocli.cli", "grpocli.launch.train_process"]
TINY = [
    *("model.warm_start_steps=20", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.problems=0"),
    *("train.steps=4", "checkpoint.every=1"),
]
SMALL = [*TINY, "reward=[format]", "reward.format.pattern='.*[02468]'"]
"""A run of seconds in which every step has something to learn: about half of all answers are even."""
SKIPPED = ("time/", "engine/", "sync/seconds")
ERROR = "grpocli: error: "


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, with all that it printed. code: None where it had to be killed."""

    code: int | None
    text: str

    @property
    def sentence(self) -> str:
        """The error that it printed, its lines joined. Raises Lost unless there is one, and nothing beside it that
        only a programmer reads."""
        self.check_readable()
        found = [line for line in self.text.splitlines() if line.startswith(ERROR)]
        demand(len(found) == 1, f"it printed {len(found)} error sentences, exit code {self.code}{self.tail}")
        return found[0].removeprefix(ERROR)

    def check_readable(self) -> None:
        """No traceback, no error of the logging, no control character that a terminal would obey."""
        demand(self.code is not None, f"it hung{self.tail}")
        for sign in ("Traceback (most recent call last)", "--- Logging error ---", "Fatal Python error"):
            demand(sign not in self.text, f"it printed {sign!r}, exit code {self.code}{self.tail}")
        control = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", self.text.replace("\r\n", "\n"))
        demand(control is None, f"it printed a control character{self.tail}")

    def check(self, code: int, *words: str) -> None:
        """Raises Lost unless it ended with `code` and, where that is an error, one sentence with these words."""
        demand(self.code == code, f"it ended with {self.code}, not {code}{self.tail}")
        if code not in (0, 3):
            said = self.sentence
            for word in words:
                demand(word in said, f"its sentence does not name {word!r}: {said}")
        else:
            self.check_readable()

    @property
    def tail(self) -> str:
        return "\n      " + "\n      ".join(repr(line)[1:-1][:300] for line in self.text.splitlines()[-12:])


class Tree:
    """A process and all below it, also those that have moved away since they were seen."""

    def __init__(self, pid: int) -> None:
        self.root, self.seen = pid, {pid: _started(pid)}

    def look(self) -> list[int]:
        """Its living processes, in the order in which they were found."""
        parents = dict(_parents())
        more = True
        while more:
            new = [pid for pid, parent in parents.items() if parent in self.seen and pid not in self.seen]
            self.seen |= {pid: _started(pid) for pid in new}
            more = bool(new)
        return [pid for pid, start in self.seen.items() if start and pid in parents and _started(pid) == start]

    def memory(self) -> set[Path]:
        """What it has in shared memory: weights, and the queues and semaphores between vLLM's processes."""
        named = re.compile(rb"/dev/shm/(?:psm_[0-9a-f]+|" + PREFIX.encode() + rb"\w+)")
        texts = [read(pid, "maps") + read(pid, "environ") for pid in self.look()]
        found = {Path(os.fsdecode(name)) for text in texts for name in named.findall(text)}
        names = [shared_memory_name(path) for path in found if path.name.startswith(PREFIX)]
        return found.union(*(SHM.glob(pattern) for name in names for pattern in (f"{name}_*", f"sem.{name}-*")))

    def wait_gone(self) -> None:
        """Raises Lost, and ends what is left, unless all of it ends by itself."""
        deadline = time.monotonic() + GONE
        while left := self.look():
            if time.monotonic() > deadline:
                names = ", ".join(_name(pid) for pid in left)
                self.end()
                raise Lost(f"{len(left)} processes were left {GONE:g} s after its end: {names}")
            time.sleep(0.1)

    def end(self) -> None:
        for pid in self.look():
            _kill(pid, signal.SIGKILL)


class Command:
    """One that runs. tree: its processes."""

    def __init__(self, process: Any, log: Path) -> None:
        self._process, self.log = process, log
        self.tree = Tree(process.pid)

    @property
    def pid(self) -> int:
        return self.tree.root

    @property
    def code(self) -> int | None:
        """None while it runs; minus the signal's number where one has ended it."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        code: int | None = self._process.exitcode
        return code

    def wait_until(self, happened: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """False where it ended, or hung, before that happened."""
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

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Its end; it is killed where that does not come."""
        ended = self.wait_until(lambda: self.code is not None, seconds)
        if not ended:
            self.tree.end()
        code = self.code if ended else None
        text = self.log.read_bytes().decode(errors="replace")
        return Ended(code, text)


@dataclass(slots=True)
class Place:
    """folder: of one trial. shared: what trials have in common, among it finished runs, made once."""

    folder: Path
    shared: Shared

    def start(
        self,
        *argv: str,
        fresh: bool = False,
        env: Mapping[str, str] | None = None,
        memory_gb: float | None = None,
    ) -> Command:
        """`grpocli` with these arguments, in this folder.

        fresh: by a new interpreter, as a user starts it; else a fork of one that has imported everything.
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
        """What it returns, as JSON knows it, in a process of its own. Raises Lost where something of it stays."""
        log, answer = self.folder / "call.log", self.folder / "answer.json"
        log.touch()
        command = self._fork(log, self.shared.environment, None, _answer, str(answer), function, args)
        ended = command.wait()
        command.tree.wait_gone()
        demand(answer.exists(), f"it ended with {ended.code}{ended.tail}")
        return json.loads(answer.read_text())

    def run(self, *argv: str, seconds: float = PATIENCE, **more: Any) -> Ended:
        """Start it and wait for its end, and that of all it has started."""
        command = self.start(*argv, **more)
        ended = command.wait(seconds)
        command.tree.wait_gone()
        return ended

    def finished(self, *options: str, small: Sequence[str] = SMALL) -> Path:
        """A run with these options to which nothing happened."""
        return self.shared.finished([*small, *options])

    def copy(self, run: Path) -> Path:
        """Of a run, in this trial's folder, that can be resumed and damaged."""
        return Path(shutil.copytree(run, self.folder / "run"))


@dataclass
class Shared:
    """folder: of all trials. environment: of their commands. real: whether servers may be vLLM's own."""

    folder: Path
    real: bool = True
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
            "PYTHONPATH": str(TESTS),
            "COLUMNS": "200",
        }
        self.environment = {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"} | own
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    @contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A folder for one trial, which stays only where it was lost."""
        folder = self.folder / name.replace(":", "_")
        folder.mkdir(parents=True)
        try:
            yield Place(folder, self)
        except LeftOut:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)

    def once(self, name: str, make: Callable[[], Path]) -> Path:
        """Made by the first trial that asks; the others wait for it."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._runs:
                self._runs[name] = make()
        return self._runs[name]

    def finished(self, options: Sequence[str]) -> Path:
        def make() -> Path:
            folder = Path(tempfile.mkdtemp(prefix="finished_", dir=self.folder))
            place = Place(folder, self)
            ended = place.run("train", *options, f"hydra.run.dir={folder}/run", seconds=START)
            ended.check(0)
            return folder / "run"

        return self.once(" ".join(options), make)

    def known(self, command: Command) -> Command:
        self._commands = [one for one in self._commands if one.code is None] + [command]
        return command

    def end(self) -> None:
        """Break off what runs; its trials are lost."""
        for command in self._commands:
            command.tree.end()

    def at_end(self, close: Callable[[], None]) -> None:
        self._closing.append(close)

    def close(self) -> None:
        for close in self._closing:
            close()


def metrics(run: Path) -> list[dict[str, Any]]:
    """Without what need not repeat; none of a run that ended before its first step."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(SKIPPED)} for row in rows]


def check_equal(run: Path, expected: Path) -> None:
    """Raises Lost unless both ended with the same model, to the bit, after the same steps."""
    ours, theirs = metrics(run), metrics(expected)
    steps = [row["step"] for row in ours]
    demand(steps == [row["step"] for row in theirs], f"its steps are {steps}")
    for row, other in zip(ours, theirs, strict=True):
        names = sorted(name for name in row.keys() | other.keys() if repr(row.get(name)) != repr(other.get(name)))
        demand(not names, f"step {row['step']} has other metrics: {', '.join(names[:8])}")
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, expected)]
    demand(models[0] == models[1], "its final model is another one")


def is_root() -> None:
    """Raise LeftOut for another user."""
    if os.geteuid() != 0:
        raise LeftOut("needs root")


def has(module: str) -> None:
    """Raise LeftOut where a module is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise LeftOut(f"{module} is not installed")


def _forked(
    folder: str,
    env: dict[str, str],
    log: str,
    memory_gb: float | None,
    function: Callable[..., object],
    args: Sequence[Any],
) -> None:
    """In a process of its own."""
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
    """What `python -m grpocli` does."""
    from grpocli.cli import main

    sys.argv = ["grpocli", *argv]
    main()


def _answer(path: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    answer = function(*args)
    Path(path).write_text(json.dumps(answer))


def _parents() -> Iterator[tuple[int, int]]:
    for path in os.listdir("/proc"):  # noqa: PTH208  this is done often
        if path.isdigit():
            fields = read(int(path), "stat").rpartition(b")")[2].split()
            if fields and fields[0] not in (b"Z", b"X"):
                yield int(path), int(fields[1])


def _started(pid: int) -> str:
    """When, so that a number that is given again is not taken for the process that had it; empty if it has ended."""
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return fields[19].decode() if fields and fields[0] not in (b"Z", b"X") else ""


def _name(pid: int) -> str:
    return read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:60].strip() or str(pid)


def read(pid: int, name: str) -> bytes:
    """A file of /proc about a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
