"""Files of a vLLM server: its address and key, reports between processes of a run, its private folder, and its log.

The folder `engine/` of a run holds the first two. The log tells how far a start is, and the cause of a failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpocli.cache import cache_dir
from grpocli.files import read_shared, write_atomic

SHM = Path("/dev/shm")
POLL = 0.2
"""Seconds between checks of files, logs, processes and threads."""
ROOM = 2**30  # bytes: a memory file system with less free space is too small for weights
FOLDER = "grpocli-weights-"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server and the data needed to use it."""

    url: str
    """Without a slash at the end."""
    api_key: str = field(repr=False)  # errors and log lines may show the other fields
    shm_dir: str
    """The folder that the server reads weights from."""
    log: str | None = None
    """Its output, if this machine has it."""
    generation: int = 0
    """The number of earlier servers with the same role; each has another URL."""
    gone: str | None = None
    """Why no further server will come, if so."""
    log_from: int = 0
    """The byte at which this server's output begins."""

    def cause(self) -> str:
        """The cause of a failure according to the log, to append to a sentence; "" without a log."""
        if not self.log or not Path(self.log).exists():
            return ""
        cause = failure_cause(Path(self.log), self.log_from)
        return f": {cause} (see {self.log})" if cause else f": see {self.log}"

    def refuses_an_option(self) -> bool:
        """Whether the log says that vLLM refuses an option."""
        return bool(self.log and REFUSED_OPTION.search(failure_cause(Path(self.log), self.log_from)))

    def save(self, path: Path) -> None:
        """Write it atomically with mode 0600."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(asdict(self), indent=1), 0o600)

    @classmethod
    def load(cls, path: Path) -> Endpoint:
        """Read an endpoint file. Raises FileNotFoundError, or ValueError if the file does not hold an endpoint."""
        try:
            return cls(**json.loads(read_shared(path)))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} does not describe a vLLM server: {error}") from error


def run_file(run_dir: Path, index: int = 0) -> Path:
    """The endpoint file of a run's server number `index`."""
    return run_dir / "engine" / f"endpoint_{index}.json"


def run_files(run_dir: Path) -> list[Path]:
    """The endpoint files of all servers of a run, in order."""
    found = (run_dir / "engine").glob("endpoint_*.json")
    return sorted(found, key=lambda path: int(path.stem.removeprefix("endpoint_")))


def lost_file(run_dir: Path, index: int) -> Path:
    """Holds the generation of a server that a trainer has lost, and the reason, for the process that started it."""
    return run_dir / "engine" / f"lost_{index}"


def failed_file(run_dir: Path, index: int) -> Path:
    """Holds the error of rollout node number `index`, which could not start its servers."""
    return run_dir / "engine" / f"failed_{index}.json"


def over_file(run_dir: Path) -> Path:
    """Its existence ends the servers on rollout nodes, and marks their end as intended for the batch script."""
    return run_dir / "engine" / "over"


def shared_weights_folder(run_dir: Path) -> Path:
    """The folder that servers on rollout nodes read weights from, with sync=shm."""
    return run_dir.absolute() / "engine" / "weights"


def new_engine_folder(run_dir: Path) -> None:
    """Empty `engine/` of an earlier session, before rollout nodes look there; NFS renames files that one has open."""
    folder = run_dir / "engine"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def serve_file(port: int) -> Path:
    """The endpoint file of the server that `grpocli vllm-serve` runs on `port` of this machine."""
    return cache_dir() / "serve" / f"{port}.json"


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder for a server's weights and sockets, removed by its owner, its guard, or the next start here."""

    path: Path
    lock: int
    """A file in it, locked while the folder is in use. A pid would not do: containers share /dev/shm."""


@contextlib.contextmanager
def private_folder() -> Iterator[PrivateFolder]:
    """A new folder in shared memory, or in the temporary folder if that is small; removed after the block.

    Folders of dead owners are removed first.
    """
    sweep()
    in_memory = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= ROOM
    while True:
        path = Path(tempfile.mkdtemp(prefix=FOLDER, dir=SHM if in_memory else None))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # on a file system without locks `sweep` cannot lock it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            break
        os.close(lock)  # another process has swept it before the lock
    try:
        yield PrivateFolder(path, lock)
    finally:
        _remove(path)
        os.close(lock)


def sweep() -> None:
    """Remove this user's folders without an owner, and their shared memory."""
    for place in {SHM, Path(tempfile.gettempdir())}:
        for path in place.glob(f"{FOLDER}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # in use, or being removed
                if path.lstat().st_uid != os.getuid():
                    continue
                lock = os.open(path / LOCK, os.O_RDWR)  # a folder without a lock file may be in use, and stays
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)


def shared_memory_name(folder: Path) -> str:
    """The first part of the names of a server's shared memory, which lies outside its folder."""
    return folder.name.removeprefix(FOLDER)


def shared_memory_patterns(folder: Path) -> list[str]:
    """Glob patterns of a server's files in SHM."""
    name = shared_memory_name(folder)
    return [f"{name}_*", f"sem.{name}-*"]


def _remove(folder: Path) -> None:
    for pattern in shared_memory_patterns(folder):
        for piece in SHM.glob(pattern):
            piece.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


TAIL = 256 * 1024  # bytes at the end of a log that are searched for the cause
ERROR = re.compile(r"(?:^|[\s\]])((?:[\w.]+\.)?\w*(?:Error|Exception): .+|[\w.]+: error: .+)$")
NOT_THE_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|CancelledError|KeyboardInterrupt")
LINE_PREFIX = re.compile(r"^(?:\(\S+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[\S+\] )?")  # of vLLM's log lines
REFUSED_OPTION = re.compile(r"error: (?:argument|unrecognized arguments)|validation errors? for")
DETAILS = 6
"""Lines after pydantic's "validation error for" that say which option, and why."""


def log_lines(log: Path, since: int = 0) -> list[str]:
    """The last lines of a log after the byte `since`, without their prefixes; none without a log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - TAIL))
        return [LINE_PREFIX.sub("", line).strip() for line in file.read().decode(errors="replace").splitlines()]


def failure_cause(log: Path, since: int = 0) -> str:
    """The cause of a failure in vLLM's words: the last line of the log that names an error; "" if none does."""
    lines = log_lines(log, since)
    found = [(at, match[1]) for at, line in enumerate(lines) if (match := ERROR.search(line))]
    causes = [(at, cause) for at, cause in found if not NOT_THE_CAUSE.search(cause)]
    if not causes:
        return ""
    at, cause = causes[-1]
    if "validation error" in cause:
        cause = " ".join(" ".join([cause, *lines[at + 1 : at + 1 + DETAILS]]).split())
    return re.sub(r"\w+: Worker failed with error '(.*)', please check.*", r"\1", cause)[:400]
