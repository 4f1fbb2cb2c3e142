"""Where a vLLM server is and how to talk to it: files that only their owner can read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SHM = Path("/dev/shm")
ROOM = 2**30  # a memory file system with less than this is too small for weights


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: no slash at its end. shm_dir: the folder that the server reads weights from. log: its output, if ours."""

    url: str
    api_key: str
    shm_dir: str
    log: str | None = None

    def save(self, path: Path) -> None:
        """Write it with mode 0600: beside, then renamed, so that a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)

    @classmethod
    def load(cls, path: Path) -> Endpoint:
        """Raises FileNotFoundError, or ValueError for a file that is not one of ours."""
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} does not describe a vLLM server: {error}") from error


def run_file(run_dir: Path) -> Path:
    """Where a run's trainer processes find their server."""
    return run_dir / "engine" / "endpoint.json"


def serve_file(port: int) -> Path:
    """Where `grpocli vllm-serve` leaves the key of the server on `port` of this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    own = os.environ.get("GRPOCLI_CACHE") or f"{cache}/grpocli"
    return Path(own) / "serve" / f"{port}.json"


def weights_dir() -> Path:
    """A new private folder for weights: in shared memory, or the temporary folder where that is small or missing."""
    in_memory = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free >= ROOM
    return Path(tempfile.mkdtemp(prefix="grpocli-weights-", dir=SHM if in_memory else None))
