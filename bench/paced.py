"""A stand-in for vLLM that generates at a given speed, and an objective that trains at a given speed.

`python bench/paced.py` serves the built-in model on a free port. A completion has a random length, and one token of
each of n running sequences takes --first + n * --each seconds, which the server sleeps: so other programs of the
machine hardly change the times of a run. `algorithm/objective=bench/paced.py:Paced` sleeps for each micro-batch.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpocli.algorithm.objective import Clip
from grpocli_tools.plan.simulate import LogNormal

THREADS = ThreadPoolExecutor(2048)


@dataclass(frozen=True)
class Paced(Clip):
    """The clipped objective, later."""

    seconds: float = 6.0
    """Of a micro-batch."""

    def __call__(self, *tensors: Any) -> Any:
        time.sleep(self.seconds)
        return super().__call__(*tensors)


def alternating(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that differs within every group, so that each step trains all of its completions."""
    return [float(place % 2) for place in range(len(completion_ids))]


def parity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward of the first token, which differs within a share of groups that is the server's --kept."""
    return [float(ids[0] % 2) for ids in completion_ids]


class Pace:
    """Continuous batching: all running sequences advance together, and more of them make a token slower.

    Sequences without a slot wait in order.
    """

    def __init__(self, slots: int, first: float, each: float) -> None:
        self.slots, self.first, self.each = slots, first, each
        self.changed, self.order = threading.Condition(), itertools.count()
        self.waiting: deque[tuple[int, Future[None]]] = deque()
        self.running: list[tuple[float, int, Future[None]]] = []  # a heap of ends, in tokens since the start
        self.progress, self.at = 0.0, time.perf_counter()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, lengths: list[int]) -> None:
        """Return when sequences of these lengths are done."""
        ended: list[Future[None]] = [Future() for _ in lengths]
        with self.changed:
            self._advance()
            self.waiting += zip(lengths, ended, strict=True)
            self._fill()
            self.changed.notify()
        wait(ended)

    def _run(self) -> None:
        with self.changed:
            while True:
                missing = self.running[0][0] - self.progress if self.running else math.inf
                self.changed.wait(min(missing * self._seconds, threading.TIMEOUT_MAX))
                self._advance()

    @property
    def _seconds(self) -> float:
        return self.first + len(self.running) * self.each

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            length, ended = self.waiting.popleft()
            heapq.heappush(self.running, (self.progress + length, next(self.order), ended))

    def _advance(self) -> None:
        """Move to the present, one completion after the other, since each changes the speed of the others."""
        now = time.perf_counter()
        while self.running and (end := self.at + (self.running[0][0] - self.progress) * self._seconds) <= now:
            self.at = end
            self.progress, _, ended = heapq.heappop(self.running)
            ended.set_result(None)
            self._fill()
        if self.running:
            self.progress += (now - self.at) / self._seconds
        self.at = now


def serve(args: argparse.Namespace) -> None:
    from chaos import stand_in

    lengths = LogNormal.with_mean(args.mean, math.sqrt(math.expm1(args.sigma**2)), args.longest)

    class Model(stand_in.Model):
        def __init__(self, path: str, folder: Path) -> None:
            super().__init__(path, folder)
            self.pace = Pace(args.slots, args.first, args.each)

        async def __call__(self, *event: Any) -> None:
            asyncio.get_running_loop().set_default_executor(THREADS)  # each waiting request holds one
            await super().__call__(*event)

        def answer(self, body: dict[str, Any]) -> dict[str, Any]:
            params = body["sampling_params"]
            if "prompt_logprobs" in params:
                return self.scored(body["token_ids"])
            self.running.wait()
            random = np.random.default_rng(params.get("seed", 0))
            drawn = lengths.draw(random, params.get("n", 1)).tolist()
            kept, version = random.random() < args.kept, self.version
            self.pace.generate(drawn)
            return {"choices": [self.choice(i, n, params["max_tokens"], kept, version) for i, n in enumerate(drawn)]}

        def choice(self, index: int, length: int, limit: int, kept: bool, version: str) -> dict[str, Any]:
            self.generated += length
            shown = math.ceil(length / args.per_token)
            return {
                "index": index,
                "token_ids": [5 + index % 2 * kept] * shown,
                "logprobs": {"content": [{"logprob": -2.0}] * shown},
                "finish_reason": "length" if shown == limit else "stop",
                "weight_versions": [{"version": version, "start": 0, "end": shown}],
            }

    stand_in.main(["model.warm_start_steps=20", "engine.max_model_len=64"], Model)


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--slots", type=int, default=1024, help="sequences that run at a time (1024)")
    cli.add_argument("--first", type=float, default=0.15, help="seconds for a token (0.15)")
    cli.add_argument("--each", type=float, default=0.0025, help="and for each running sequence (0.0025)")
    cli.add_argument("--mean", type=float, default=20.0, help="tokens of a completion (20)")
    cli.add_argument("--sigma", type=float, default=0.8, help="standard deviation of their logarithm (0.8)")
    cli.add_argument("--longest", type=int, default=48, help="the most of them (48)")
    cli.add_argument("--per-token", type=int, default=1, help="tokens that take time for one that is returned (1)")
    cli.add_argument("--kept", type=float, default=1.0, help="share of groups whose rewards differ (1.0)")
    serve(cli.parse_args())
