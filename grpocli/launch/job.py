"""What the launching process hands to trainer processes, as a file in the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from grpocli.rollout.engine import EngineJob
from grpocli.tracking.files import write_atomic

NAME = "job.json"


@dataclass(frozen=True, slots=True)
class Job:
    """engine: what the engine was launched with. checkpoint: where to go on from (null: from the start)."""

    engine: EngineJob
    checkpoint: Path | None

    def save(self, run_dir: Path) -> None:
        write_atomic(run_dir / NAME, json.dumps(asdict(self), indent=2, default=str))

    @classmethod
    def load(cls, run_dir: Path) -> Job:
        values = json.loads((run_dir / NAME).read_text())
        engine = values["engine"]
        at = values["checkpoint"]
        return cls(EngineJob(**engine | {"run_dir": Path(engine["run_dir"])}), Path(at) if at else None)
