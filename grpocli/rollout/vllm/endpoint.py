"""Where a vLLM server is and how to talk to it: files that only their owner can read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpocli.files import read_shared
from grpocli.rollout.vllm.log import failure_cause, find_cause

SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: no slash at its end. shm_dir: the folder that the server reads weights from. log: its output, if ours;
    log_from: the byte at which it begins, after that of servers before it.

    generation: counts the servers that have stood here, one after the other died; each has a URL of its own.
    gone: why there will be no other.
    """

    url: str
    api_key: str = field(repr=False)  # an error or a log line may show the rest
    shm_dir: str
    log: str | None = None
    generation: int = 0
    gone: str | None = None
    log_from: int = 0

    def cause(self) -> str:
        """What its log says went wrong, to put behind a sentence; empty without a log."""
        return failure_cause(Path(self.log), self.log_from) if self.log else ""

    def names_a_key(self) -> bool:
        """Whether its log tells which key must be changed."""
        return bool(self.log and find_cause(Path(self.log), self.log_from)[0])

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
            return cls(**json.loads(read_shared(path)))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} does not describe a vLLM server: {error}") from error


def run_file(run_dir: Path, index: int = 0) -> Path:
    """Where a run's trainer processes find its server number `index`."""
    return run_dir / "engine" / f"endpoint_{index}.json"


def run_files(run_dir: Path) -> list[Path]:
    """Those of all of a run's servers, in order."""
    found = (run_dir / "engine").glob("endpoint_*.json")
    return sorted(found, key=lambda path: int(path.stem.removeprefix("endpoint_")))


def lost_file(run_dir: Path, index: int) -> Path:
    """Holds the generation of a server that the trainer found gone or stuck, for the process that started it."""
    return run_dir / "engine" / f"lost_{index}"


def serve_file(port: int) -> Path:
    """Where `grpocli vllm-serve` leaves the key of the server on `port` of this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    own = os.environ.get("GRPOCLI_CACHE") or f"{cache}/grpocli"
    return Path(own) / "serve" / f"{port}.json"
