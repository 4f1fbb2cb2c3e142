"""Files of a vLLM server: its address and key, reports between processes of a run, and its private folder.

In the run folder, `engine/endpoint_N.json` holds the address and key of server N, `engine/lost_N` the report of a
trainer that lost it, `engine/failed_N.json` the error of rollout node N, and `engine/over` ends the rollout nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpocli.cache import cache_dir
from grpocli.files import read_shared, write_atomic
from grpocli.rollout.vllm.server_log import failure_cause, find_cause

SHM = Path("/dev/shm")
ROOM = 2**30  # bytes: a memory file system with less free space is too small for weights
PREFIX = "grpocli-weights-"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server and the data needed to use it.

    url: without a slash at the end. shm_dir: the folder that the server reads weights from. log: its output, if this
    machine has it; log_from: the byte at which this server's output begins. generation: the number of earlier servers
    with the same role; each has another URL. gone: why no further server will come, if so.
    """

    url: str
    api_key: str = field(repr=False)  # errors and log lines may show the other fields
    shm_dir: str
    log: str | None = None
    generation: int = 0
    gone: str | None = None
    log_from: int = 0

    def cause(self) -> str:
        """The cause of a failure according to the log, to append to a sentence; "" without a log."""
        return failure_cause(Path(self.log), self.log_from) if self.log else ""

    def names_a_key(self) -> bool:
        """Whether the log names a config key to change."""
        return bool(self.log and find_cause(Path(self.log), self.log_from)[0])

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
    """Empty `engine/` of an earlier session's files, before rollout nodes look there.

    Files that another machine has open stay: NFS renames them.
    """
    folder = run_dir / "engine"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def serve_file(port: int) -> Path:
    """The endpoint file of the server that `grpocli vllm-serve` runs on `port` of this machine."""
    return cache_dir() / "serve" / f"{port}.json"


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder for a server's weights and sockets, removed by its owner, its guard, or the next start on this machine.

    lock: the descriptor of a locked file in it. The folder is in use as long as any process holds the lock; a process
    id would not do, because containers share /dev/shm.
    """

    path: Path
    lock: int


@contextlib.contextmanager
def private_folder() -> Iterator[PrivateFolder]:
    """A new folder in shared memory, or in the temporary folder if that is small; removed after the block.

    Folders of dead owners are removed first.
    """
    sweep()
    folder = _make_folder()
    try:
        yield folder
    finally:
        _remove(folder.path)
        os.close(folder.lock)


def sweep() -> None:
    """Remove this user's folders without an owner, and their shared memory."""
    for place in {SHM, Path(tempfile.gettempdir())}:
        for path in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # in use, or being removed
                if path.lstat().st_uid != os.getuid():
                    continue
                lock = os.open(path / LOCK, os.O_RDWR)  # a folder without a lock file may be in use, and stays
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)


def shared_memory_name(folder: Path) -> str:
    """The first part of the names of a server's shared memory, which lies outside its folder."""
    return folder.name.removeprefix(PREFIX)


def shared_memory_patterns(folder: Path) -> list[str]:
    """Glob patterns of a server's files in SHM."""
    name = shared_memory_name(folder)
    return [f"{name}_*", f"sem.{name}-*"]


def _make_folder() -> PrivateFolder:
    in_memory = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= ROOM
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM if in_memory else None))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # on a file system without locks `sweep` cannot lock it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # otherwise another process has swept it before the lock
            return PrivateFolder(path, lock)
        os.close(lock)


def _remove(folder: Path) -> None:
    for pattern in shared_memory_patterns(folder):
        for piece in SHM.glob(pattern):
            piece.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
