"""A stand-in for vLLM that generates at a given speed, and an objective that trains at a given speed.

`python bench/paced.py` serves the built-in model on a free port. A completion has a random length, and one token of
each of n running sequences takes FIRST + n * EACH seconds, which the server sleeps: so other programs of the machine
hardly change the times of a run. `algorithm/objective=bench/paced.py:Paced` sleeps UPDATE seconds for each micro-batch.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from grpocli.algorithm.objective import Clip

FIRST, EACH, UPDATE = 0.15, 0.0025, 6.0
LONGEST, TYPICAL, SPREAD = 48, 16.0, 0.8
THREADS = ThreadPoolExecutor(256)


class Paced(Clip):
    """The clipped objective, later."""

    def __call__(self, *tensors: Any) -> Any:
        time.sleep(UPDATE)
        return super().__call__(*tensors)


def alternating(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that differs within every group, so that each step trains all of its completions."""
    return [float(place % 2) for place in range(len(completion_ids))]


class Pace:
    """Continuous batching: all running sequences advance together, and more of them make a token slower."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ends: list[float] = []  # of the running sequences, in tokens since the start
        self.progress, self.at = 0.0, time.perf_counter()

    def generate(self, lengths: list[int]) -> None:
        """Return when sequences of these lengths are done."""
        with self.changed:
            self._advance()
            ends = [self.progress + length for length in lengths]
            for end in ends:
                heapq.heappush(self.ends, end)
            self.changed.notify_all()
            while self.progress < max(ends):
                missing = self.ends[0] - self.progress if self.ends else 0.0
                self.changed.wait(max(0.0, missing * self._seconds))
                self._advance()

    @property
    def _seconds(self) -> float:
        return FIRST + len(self.ends) * EACH

    def _advance(self) -> None:
        """Move to the present, one completion after the other, since each makes the others faster."""
        now = time.perf_counter()
        while self.ends and self.at + (self.ends[0] - self.progress) * self._seconds <= now:
            first, seconds = self.ends[0], self._seconds
            self.at += (first - self.progress) * seconds
            self.progress = first
            while self.ends and self.ends[0] <= first:
                heapq.heappop(self.ends)
            self.changed.notify_all()
        if self.ends:
            self.progress += (now - self.at) / self._seconds
        self.at = now


def serve() -> None:
    from chaos import stand_in

    class Model(stand_in.Model):
        def __init__(self, path: str, folder: Path) -> None:
            super().__init__(path, folder)
            self.pace = Pace()

        async def __call__(self, *event: Any) -> None:
            asyncio.get_running_loop().set_default_executor(THREADS)  # each waiting request holds one
            await super().__call__(*event)

        def answer(self, body: dict[str, Any]) -> dict[str, Any]:
            params = body["sampling_params"]
            if "prompt_logprobs" in params:
                return self.scored(body["token_ids"])
            self.running.wait()
            random = np.random.default_rng(params.get("seed", 0))
            drawn = random.lognormal(np.log(TYPICAL), SPREAD, params.get("n", 1))
            lengths = [int(n) for n in np.clip(np.rint(drawn), 1, LONGEST)]
            version = self.version
            self.pace.generate(lengths)
            return {"choices": [self.choice(i, n, version) for i, n in enumerate(lengths)]}

        def choice(self, index: int, length: int, version: str) -> dict[str, Any]:
            self.generated += length
            return {
                "index": index,
                "token_ids": [5 + index % 5] * length,
                "logprobs": {"content": [{"logprob": -2.0}] * length},
                "finish_reason": "length" if length == LONGEST else "stop",
                "weight_versions": [{"version": version, "start": 0, "end": length}],
            }

    stand_in.Model = Model
    stand_in.main(["model.warm_start_steps=20", "engine.max_model_len=64"])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    serve()
