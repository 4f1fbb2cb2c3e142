"""The folder of a run, and what is where in it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from grpocli.errors import ConfigError, GrpoError, RunError

KEY = "hydra.run.dir"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths below `path`. Files are made by whoever writes them."""

    path: Path

    @property
    def name(self) -> str:
        """What the run is called: its folder and the one above."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """Everything that is too much for the console."""
        return self.path / "run.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of `step_000010/` and so on."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The final model, a Hugging Face folder."""
        return self.path / "model"

    def rollouts(self, step: int) -> Path:
        """What was sampled and kept in a step."""
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def check_writable(self, resuming: bool) -> None:
        """Make the folder and try to write. Raises ConfigError where that fails or another run is there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".tmp-") as file:
                file.write(b"\0" * 65536)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError.of(
                KEY, self.path, f"cannot be written: {error.strerror}; choose another folder"
            ) from error
        if self.metrics.exists() and not resuming:
            raise ConfigError.of(
                KEY, self.path, f"holds a run already; go on with resume={self.path}, or choose another folder"
            )

    def forget(self) -> None:
        """Remove the folder of a run that never began: it holds nothing but what Hydra put there."""
        if any(p.name not in (".hydra", self.log.name) for p in self.path.iterdir()):
            return
        shutil.rmtree(self.path)

    def trouble(self, error: OSError) -> GrpoError:
        """An OSError in the middle of a run, as a sentence."""
        where = error.filename or self.path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return RunError(f"no space left on the disk while writing {where}; free some, then resume={self.path}")
        return RunError(f"{where}: {error.strerror or error}")
