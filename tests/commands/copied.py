"""An engine beside the trainer that needs no server: it samples from a copy of the policy made at each sync."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpocli.data import Completion, Request, Sampling
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.sampler import sample
from grpocli.rollout.transformers_engine import stop_ids


@dataclass(frozen=True)
class Copied:
    """slow: seconds that a batch of completions takes at least. fails: the call in which the engine breaks; 0: none."""

    slow: float = 0.0
    fails: int = 0

    overlaps = True

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        return nullcontext()

    def connect(self, context: EngineContext) -> CopiedEngine:
        return CopiedEngine(self, context)


class CopiedEngine:
    """Deterministic: tokens are a function of the weights and the requests' seeds."""

    def __init__(self, part: Copied, context: EngineContext) -> None:
        self.part, self.context = part, context
        self.model: Any = None
        self.version = self.calls = 0
        self.busy = threading.Lock()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One call at a time, as the seconds of `slow` are an engine's that is busy."""
        with self.busy:
            self.calls += 1
            if self.calls == self.part.fails:
                raise RuntimeError("the engine broke")
            time.sleep(self.part.slow)
            stop = stop_ids(self.model, self.context.tokenizer)
            return sample(self.model, requests, sampling, stop, self.version) if requests else []

    def sync(self, version: int) -> dict[str, float]:
        assert not self.busy.locked(), "weights changed under running requests"
        self.model = copy.deepcopy(self.context.policy.model).eval()
        self.version = version
        return {"sync/bytes": 1.0}

    def close(self) -> None:
        """Nothing to stop."""


def config_dir(folder: Path) -> list[str]:
    """The arguments that make it a choice, `engine=copied`; `tests` must be in PYTHONPATH."""
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    (folder / "engine" / "copied.yaml").write_text("_target_: commands.copied.Copied\nslow: 0.0\nfails: 0\n")
    return ["--config-dir", str(folder), "engine=copied"]
