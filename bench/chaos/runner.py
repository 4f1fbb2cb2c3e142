"""All kinds of trials, and running several at a time until a deadline."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain, zip_longest

from chaos import damages, data, disks, faults, keyless, kills, rewards, sandbox_attacks
from chaos.trial import EACH, NumberedTrial, PromiseBroken, Skipped, draw_trials
from chaos.workspace import Shared

KINDS = (kills.KIND, damages.KIND, disks.KIND, faults.KIND, data.KIND, rewards.KIND, sandbox_attacks.KIND, keyless.KIND)
"""In the order of the table."""
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "FAILED", "skipped", "not run"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended: `PASSED`, `FAILED`, `SKIPPED` or `NOT_RUN`, and the reason unless it passed."""

    numbered: NumberedTrial
    word: str
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.word == FAILED


def select(only: Sequence[str], seed: int, count: int | None, names: Sequence[str] = ()) -> list[NumberedTrial]:
    """The trials with these names, or the trials of these kinds, interleaved."""
    kinds = {kind.name: kind for kind in KINDS}
    if names:
        found = []
        for name in names:
            kind, _, number = name.partition(":")
            trials = draw_trials(kinds[kind], int(number) // EACH)
            found.append(next(trial for trial in trials if trial.name == name))
        return found
    lists = [draw_trials(kinds[name], seed)[:count] for name in only]
    return [one for one in chain.from_iterable(zip_longest(*lists)) if one is not None]


def run_trials(
    trials: Sequence[NumberedTrial], shared: Shared, workers: int = 2, deadline: float | None = None
) -> Iterator[Outcome]:
    """Run trials and yield each outcome. No trial starts after `deadline`, in seconds of the monotonic clock."""

    def one(numbered: NumberedTrial) -> Outcome:
        if deadline is not None and time.monotonic() > deadline:
            return Outcome(numbered, NOT_RUN)
        try:
            with shared.workspace(numbered.name) as workspace:
                numbered.trial.execute(workspace)
        except Skipped as error:
            return Outcome(numbered, SKIPPED, str(error))
        except PromiseBroken as error:
            return Outcome(numbered, FAILED, str(error))
        except Exception:  # noqa: BLE001  an unexpected error is a failed trial
            return Outcome(numbered, FAILED, traceback.format_exc())
        return Outcome(numbered, PASSED)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, numbered) for numbered in trials]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # such as Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            shared.end()
            raise
