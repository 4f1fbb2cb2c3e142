"""reward=[code]: whether a program that the model wrote passes its tests, in a sandbox."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import part, require
from grpocli.errors import ConfigError
from grpocli.rewards.final_answer import after_thinking
from grpocli.rewards.math_format import pool_of
from grpocli.rewards.pool import Pool
from grpocli.rewards.reward import Correctness, Failure, Sample, Score

if TYPE_CHECKING:
    from grpocli.sandbox.sandbox import Limits

KEY = "reward.code"


@part("reward", "code", package="reward.code")
class Code(Correctness):
    """`right` (1) where the program in a completion passes all of the example's tests, else `wrong` (0).

    The program is the last fenced block of code, else the completion as far as it is Python. It runs in a sandbox
    (docs/rewards.md), its tests in another one, and what it returns reaches them as plain values.

    answer_column: the tests, a text or a list of texts; each passes unless it raises. Further columns that an example
    may have: `before`, code before the program; `setup`, code before the tests; `answer`, a right program, whose other
    names tests may use; `entry_point`, the name of the function that is asked for.
    partial: score the share of the tests that pass, between `wrong` and `right`; those after a test that hangs or ends
    the program run with a new one. timeout: seconds for the program and its tests, of the clock without those of
    waiting for a core, and of the processor for all its processes together. memory_mb: for all its processes together
    where there are control groups, else for each. processes: that it may start.
    disk_mb: for the files it writes. python: an interpreter whose installed packages the programs may import (null:
    ours, without packages). workers: programs at a time; 0 is one for each core.
    unsafe: run programs where they cannot be shut in: they may then do whatever you may.
    A program that could not be run is a failure and no 0.
    """

    has_processes = True
    solution_column = "answer"
    answer_column: str = "tests"
    partial: bool = False
    timeout: float = 5.0
    memory_mb: int = 512
    processes: int = 4
    disk_mb: int = 16
    python: str | None = None
    workers: int = 0
    unsafe: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 seconds")
        require(self, "memory_mb", self.memory_mb >= 64, "must be at least 64, or Python does not start")
        require(self, "processes", self.processes >= 0, "must be 0 or more")
        require(self, "disk_mb", self.disk_mb >= 1, "must be at least 1")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def check(self, columns: Sequence[str]) -> None:
        """Raises ConfigError where nothing holds a program back here."""
        super().check(columns)
        self._way()
        self._pool().start()

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        found = self._verdicts(samples)
        return [one if isinstance(one, Failure) else self._score(one["passed"]) for one in found]

    def explain(self, sample: Sample) -> str:
        """What the first test that does not pass says, and the end of what the program printed."""
        (found,) = self._verdicts([sample])
        if isinstance(found, Failure):
            return found.reason
        printed = " ".join(found["printed"].split())[-200:]
        return str(found["wrong"]) + (f"; it printed {printed!r}" if printed else "")

    def close(self) -> None:
        self._pool().close()

    @property
    def warning(self) -> str:
        from grpocli.sandbox.cgroup import place

        if self.unsafe:
            return f"{KEY}.unsafe=true: programs that the model writes run as you, with your files and your network"
        what = "bounds each process of a program and not all together, as control groups cannot be had here"
        return "" if place() else f"{KEY}.memory_mb={self.memory_mb} {what}"

    def _score(self, passed: Sequence[bool]) -> float:
        if not self.partial or all(passed):
            return self.value(all(passed))
        return self.wrong + (self.right - self.wrong) * sum(passed) / len(passed)

    def _verdicts(self, samples: Sequence[Sample]) -> list[Any]:
        way = self._way()
        jobs = [_job(sample, self.answer_column) for sample in samples]
        items = [[job, self._limits, way, self.python, self.partial] for job in jobs if not isinstance(job, Failure)]
        found = iter(self._pool().map(items))
        return [job if isinstance(job, Failure) else next(found) for job in jobs]

    @property
    def _limits(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("timeout", "memory_mb", "processes", "disk_mb")}

    def _way(self) -> str:
        from grpocli.sandbox.sandbox import Limits

        return way_for(self.python, Limits(**self._limits), self.unsafe)

    def _pool(self) -> Pool:
        from grpocli.sandbox.clock import BUSY

        # the sandbox ends programs at their time limit; the pool is for a sandbox that hangs
        longest = self.timeout * BUSY * (2 if self.partial else 1)
        return pool_of("grpocli.rewards.code_runner:run_job", self.workers, longest + 30)


@lru_cache(maxsize=8)
def way_for(python: str | None, limits: Limits, unsafe: bool) -> str:
    """How programs are shut in. Raises ConfigError, where they cannot be, unless `unsafe`."""
    from grpocli.sandbox.sandbox import SandboxError
    from grpocli.sandbox.select_backend import best

    if unsafe:
        return "none"
    try:
        return best(python, limits)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"does not start: {error}", key=f"{KEY}.python", value=python) from error
    except SandboxError as error:
        raise ConfigError(
            f"reward=[code]: programs that a model writes cannot be shut in on this machine ({error}); install "
            f"bubblewrap or allow user namespaces, or accept the risk with {KEY}.unsafe=true"
        ) from error


def _job(sample: Sample, column: str) -> dict[str, Any] | Failure:
    columns = sample.columns
    tests = columns.get(column)
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, Sequence) or not tests or not all(isinstance(test, str) for test in tests):
        return Failure(f"the example has no tests in the column {column!r}: a text or a list of texts")
    known = {"before": "before", "setup": "setup", "reference": "answer", "entry": "entry_point"}
    texts = {name: columns[own] for name, own in known.items() if isinstance(columns.get(own), str)}
    return {"text": after_thinking(sample.text), "tests": list(tests), **texts}
