"""Runs prefetching scenarios in one of several processes, for test_prefetch_processes.py.

The collectors are scripted: an event of the engine happens in the middle of a step, at a given point of training.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpocli.distributed.world import World
from grpocli.errors import EngineError, EngineGone, RunError, ServiceGone
from grpocli.hardware import Single
from grpocli.training.collector import RolloutBatch
from grpocli.training.prefetch import Prefetcher

STEPS = 4
LATE = 1.0  # seconds
WAIT = 60.0
SCENARIOS = {  # event, staleness, in_flight
    "lost": ("lost", 1, False),
    "lost, late": ("lost", 2, True),
    "gone": ("gone", 1, False),
    "gone, late": ("gone", 2, True),
    "alone": ("alone", 1, False),
}


class Collector:
    """A collector in which `event` happens in step `event_at`, once the main thread has `reached` that step."""

    def __init__(self, world: World, event: str, event_at: int) -> None:
        self.world, self.event, self.event_at = world, event, event_at
        self.draws, self.leftover = 0, list[Any]()
        self.reached = threading.Event()
        self.recovered: list[list[int]] = []
        self.prefetcher: Prefetcher

    def collect(self) -> RolloutBatch:
        step = self.draws + 1
        if step == self.event_at:
            assert self.reached.wait(WAIT)
            time.sleep(LATE / 4)  # until the main thread waits
            if self.event == "alone" and self.world.rank == 1:
                raise EngineError("only here")
            self.world.gather_objects([step])
            if self.event == "lost":
                self.recovered.append(
                    self.prefetcher.run_in_main_thread(lambda: self.world.gather_objects([self.world.rank]))
                )
            elif self.event == "gone":
                raise EngineGone("stays away")
        self.world.gather_objects([step])
        self.draws = step
        return RolloutBatch([], {"time/reward": 0.0})


def trained(world: World, event: str, staleness: int, in_flight: bool) -> dict[str, Any]:
    """Results of training in one scenario.

    With in_flight the second process is late for the step before the event.
    """
    at = 1 + staleness
    collector = Collector(world, event, at)
    rollout = SimpleNamespace(max_staleness=staleness, in_flight=in_flight)
    prefetcher = collector.prefetcher = Prefetcher(collector, world, rollout, STEPS)  # type: ignore[arg-type]
    done, error = 0, None
    try:
        for step in range(1, STEPS + 1):
            if step == 2:
                collector.reached.set()
                time.sleep(LATE if in_flight and world.rank else 0)
            with prefetcher.collection_paused_before(step):
                world.barrier()
            prefetcher.rollouts(step)
            world.sum(torch.ones(3))
            done = step
    except ServiceGone as gone:
        error = [type(gone).__name__, str(gone)]
        prefetcher.stop_after(done + 1)
        prefetcher.wait_until_idle(done + 1)
        world.barrier()  # as a checkpoint does
    except RunError as other:
        error = [type(other).__name__, str(other)]
    progress = prefetcher.state(done + 1)
    prefetcher.close()
    return {
        "done": done,
        "error": error,
        "recovered": collector.recovered,
        "drawn": [progress.draws, len(progress.ready)],
    }


def main(folder: Path) -> None:
    """Run every scenario; write one file of results per process."""
    world = World(Single(device="cpu", timeout=20))
    results = {name: trained(world, *scenario) for name, scenario in SCENARIOS.items()}
    (folder / f"{world.rank}.json").write_text(json.dumps(results))
    world.barrier()
    os._exit(0)  # a thread of the last scenario still waits for the failed process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
