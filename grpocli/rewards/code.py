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
    """`right` (1) if the program in a completion passes all of the example's tests, else `wrong` (0).

    The program is the last fenced block of code or, without one, the completion up to the point where it stops being
    Python. It runs in a sandbox (docs/rewards.md) and its tests run in another; what it returns reaches them as plain
    values. A program that could not be run is a failure, not a 0.

    Further columns that an example may have: `before`, code before the program; `setup`, code before the tests;
    `answer`, a right program, whose other names tests may use; `entry_point`, the name of the function to write.
    """

    has_processes = True
    solution_column = "answer"
    answer_column: str = "tests"
    """Column with the tests, a text or a list of texts; a test passes unless it raises."""
    partial: bool = False
    """Score the share of the tests that pass, between `wrong` and `right`. Tests after one that hangs or ends the
    program run with a new program."""
    timeout: float = 5.0
    """Seconds for a program and its tests: of wall-clock time without the wait for a core, and of processor time for
    all processes together."""
    memory_mb: int = 512
    """Memory in MiB, at least 64: for all processes of a program together where there are control groups, else for
    each."""
    processes: int = 4
    """Most processes that a program may start."""
    disk_mb: int = 16
    """Room for the files that a program writes, in MiB."""
    python: str | None = None
    """Interpreter whose installed packages the programs may import. null: grpocli's interpreter, without packages."""
    workers: int = 0
    """Programs that run at a time; 0: one per core."""
    unsafe: bool = False
    """Run programs where there is no sandbox; they may then do whatever you may."""

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
