"""Making trials, several at once, within a number of minutes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain, zip_longest

from chaos.kinds import KINDS
from chaos.place import Shared
from chaos.trial import EACH, LeftOut, Lost, Numbered, drawn

HELD, LOST, LEFT_OUT, NOT_TRIED = "held", "LOST", "left out", "not tried"


@dataclass(frozen=True, slots=True)
class Outcome:
    """word: of the four above. reason: why, unless it held."""

    numbered: Numbered
    word: str
    reason: str = ""

    @property
    def lost(self) -> bool:
        return self.word == LOST


def chosen(only: Sequence[str], seed: int, count: int | None, names: Sequence[str] = ()) -> list[Numbered]:
    """Trials of these kinds in turn, so that each has its share of the time; or those with these names."""
    kinds = {kind.name: kind for kind in KINDS}
    if names:
        found = []
        for name in names:
            kind, _, number = name.partition(":")
            trials = drawn(kinds[kind], int(number) // EACH)
            found.append(next(trial for trial in trials if trial.name == name))
        return found
    lists = [drawn(kinds[name], seed)[:count] for name in only]
    return [one for one in chain.from_iterable(zip_longest(*lists)) if one is not None]


def tried(
    trials: Sequence[Numbered], shared: Shared, workers: int = 2, deadline: float | None = None
) -> Iterator[Outcome]:
    """How each ended, as they end. deadline: by the monotonic clock; none begins after it."""

    def one(numbered: Numbered) -> Outcome:
        if deadline is not None and time.monotonic() > deadline:
            return Outcome(numbered, NOT_TRIED)
        try:
            with shared.place(numbered.name) as place:
                numbered.trial.hold(place)
        except LeftOut as error:
            return Outcome(numbered, LEFT_OUT, str(error))
        except Lost as error:
            return Outcome(numbered, LOST, str(error))
        except Exception:  # noqa: BLE001  what a trial does not expect is no promise kept
            return Outcome(numbered, LOST, traceback.format_exc())
        return Outcome(numbered, HELD)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, numbered) for numbered in trials]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # such as Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            shared.end()
            raise
