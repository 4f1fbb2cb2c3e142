"""A run whose engine is lost for good stops with a checkpoint, and all finished steps are logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from grpocli.errors import EngineGone, ServiceGone, Stopped
from grpocli.training.trainer import Trainer


class Ended:
    """A trainer of three steps that records its calls; the service is lost in the call `gone`."""

    def __init__(self, gone: tuple[str, int]) -> None:
        self.gone, self.steps, self.done_calls = gone, 0, list[tuple[str, int]]()
        self.metrics: dict[str, Any] = {}
        self.groups, self.engine_version = list[Any](), 1
        self.collector = SimpleNamespace(advantages=lambda groups: torch.zeros(0, 1))
        every = SimpleNamespace(every=1)
        train = SimpleNamespace(steps=3)
        self.run = SimpleNamespace(
            seed=0, train=train, eval=every, checkpoint=every, algorithm=SimpleNamespace(supervised=False)
        )
        self.state, self.world = SimpleNamespace(step=0), SimpleNamespace(rank=0, enter=lambda *_: None)

    train, step = Trainer.train, Trainer.step

    def __getattr__(self, verb: str) -> Any:
        def call(*_: Any) -> Any:
            if (verb, self.steps) == self.gone:
                raise EngineGone("the server stays away")
            self.steps += verb == "update"
            self.state.step = self.steps
            self.done_calls.append((verb, self.steps))
            return {"due": True, "finish": {}, "ends_early": False}.get(verb, self)

        return call

    def checkpoint_and_stop(self, gone: ServiceGone | None = None) -> NoReturn:
        self.done_calls.append(("saved", self.steps))
        raise Stopped(str(gone))


@pytest.mark.parametrize(
    "gone",
    [("evaluate_at_start", 0), ("generate_and_score", 1), ("evaluate_if_due", 2), ("checkpoint", 2), ("finish", 3)],
)
def test_finished_steps_are_logged_and_saved_wherever_the_engine_is_lost(gone: tuple[str, int]) -> None:
    trainer = Ended(gone)
    with pytest.raises(Stopped, match="stays away"):
        trainer.train()
    assert [step for verb, step in trainer.done_calls if verb == "log"] == list(range(1, gone[1] + 1))
    assert trainer.done_calls[-1] == ("saved", gone[1])
