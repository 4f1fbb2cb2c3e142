"""An engine beside the trainer without a server: it samples from a copy of the policy made at each sync."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpocli.errors import EngineGone
from grpocli.rollout.engine import Engine, EngineContext, EngineJob, EnginePart, OnGroup, ignore_group
from grpocli.rollout.sampler import sample
from grpocli.rollout.sampling import stop_token_ids
from grpocli.types import Completion, Request, Sampling

FOR_EVER = 40.0  # seconds


@dataclass(frozen=True)
class Copied(EnginePart):
    """The engine's keys.

    slow: minimum seconds of a batch of completions. fails, lost: the number of the call in which the engine breaks, or
    is lost and must be synced again; 0: none. stuck: the draw whose group hangs; 0: none. gone: a lost engine does not
    come back. meanwhile: the number of the call that returns only after an update of the policy; 0: none does.
    """

    slow: float = 0.0
    fails: int = 0
    lost: int = 0
    stuck: int = 0
    gone: bool = False
    meanwhile: int = 0

    overlaps = True

    def launch(self, job: EngineJob) -> AbstractContextManager[None]:
        return nullcontext()

    def connect(self, context: EngineContext) -> CopiedEngine:
        return CopiedEngine(self, context)


class CopiedEngine(Engine):
    """Samples tokens that depend only on the weights and the requests' seeds."""

    def __init__(self, part: Copied, context: EngineContext) -> None:
        self.part, self.context = part, context
        self.model: Any = None
        self.version = self.calls = 0
        self.busy = threading.Lock()
        self.is_gone = False
        self.syncs = 0
        self.waiting = False

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        return self.complete(requests, sampling, self.sync_again)

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        return self.complete(requests, sampling, self.wait_for_sync)

    @torch.no_grad()
    def complete(
        self, requests: Sequence[Request], sampling: Sampling, come_back: Callable[[], None]
    ) -> list[list[Completion]]:
        """One call at a time, because an engine is busy for `slow` seconds."""
        with self.busy:
            self.calls += 1
            call = self.calls
        if call == self.part.lost:
            self.is_gone = self.part.gone
            come_back()
        if call == self.part.meanwhile:  # the others are answered
            self.wait_for_training()
        if self.part.stuck and any(one.prompt and one.prompt.uid == str(self.part.stuck) for one in requests):
            time.sleep(FOR_EVER)
        with self.busy:
            if call == self.part.fails:
                raise RuntimeError("the engine broke")
            time.sleep(self.part.slow)
            stop = stop_token_ids(self.model, self.context.tokenizer)
            return sample(self.model, requests, sampling, stop, self.version) if requests else []

    def wait_for_training(self) -> None:
        trained, sampled = list(self.context.policy.model.parameters()), list(self.model.parameters())
        deadline = time.monotonic() + FOR_EVER
        while all(one.equal(other) for one, other in zip(trained, sampled, strict=True)):
            if time.monotonic() > deadline:
                raise RuntimeError("nothing was trained while completions were sampled")
            time.sleep(0.01)

    def sync_again(self) -> None:
        self.sync(self.version)

    def wait_for_sync(self) -> None:
        before, self.waiting = self.syncs, True
        while self.syncs == before:
            time.sleep(0.01)

    @property
    def needs_sync(self) -> bool:
        return self.waiting

    def sync(self, version: int) -> dict[str, float]:
        if self.context.world.any(self.is_gone):
            raise EngineGone("the engine stays away")
        assert self.context.in_flight or self.waiting or not self.busy.locked(), "weights changed during a request"
        with self.busy:
            self.model = copy.deepcopy(self.context.policy.model).eval()
            self.version = version
        self.syncs, self.waiting = self.syncs + 1, False
        return {"sync/bytes": 1.0}

    def close(self) -> None:
        """Does nothing: there is no process to stop."""


def config_dir(folder: Path) -> list[str]:
    """The arguments that choose this engine; `tests` must be in PYTHONPATH."""
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    fields = "".join(f"{field.name}: {str(field.default).lower()}\n" for field in dataclasses.fields(Copied))
    (folder / "engine" / "copied.yaml").write_text("_target_: cli.copied:Copied\n" + fields)
    return ["--config-dir", str(folder), "engine=copied"]
