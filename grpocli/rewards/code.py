"""reward=[code]: whether the program in a completion passes its tests, in a sandbox."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import UserCode, part, require
from grpocli.errors import config_errors
from grpocli.rewards.code_text import BLOCK, function_name, problem_tests, program, symbols
from grpocli.rewards.reward import Correctness, Failure, Sample, Score
from grpocli.rewards.worker_pool import WorkerPool, shared_pool

if TYPE_CHECKING:
    from grpocli.sandbox.sandbox import Limits, Submission

KEY = "reward.code"
ROOT = re.compile(r"\W")
"""What ends the name in `Solution().method`, which tests take from the program."""


@part("reward", "code", package="reward.code")
class CodeReward(Correctness):
    """`right` (1) if the program in a completion passes all of the example's tests, else `wrong` (0).

    The program is the last fenced block of Python that defines a name of the tests or, without a block, the first lines
    that are Python. It runs in a sandbox (docs/rewards.md) and its tests run in another; results reach the tests as
    plain values. A program that could not be run, or whose tests pass without it, is a failure, not a 0.

    Further columns that an example may have: `before`, code before the program; `setup`, code before the tests;
    `answer`, a right program, whose other names tests may use; `entry_point`, the name of the function to write.
    """

    scores_independently = True
    solution_column = "answer"
    answer_column: str = "tests"
    """Column with the tests: Python code, objects with `input` and `output`, or a list, also as JSON text."""
    partial: bool = False
    """Score the share of the tests that pass, between `wrong` and `right`."""
    timeout: float = 5.0
    """Seconds for a program and its tests: of wall-clock time without the wait for a core, and of processor time for
    all processes together. Each input of a script has as many, and all inputs together ten times as many."""
    memory_mb: int = 512
    """Memory in MiB, at least 64: for all processes of a program together where there are control groups, else for
    each."""
    processes: int = 4
    """Most processes that a program may start."""
    disk_mb: int = 16
    """Room for the files that a program writes, in MiB."""
    python: UserCode | None = None
    """Interpreter whose installed packages the programs may import. null: grpocli's interpreter, without packages."""
    workers: int = 0
    """Programs that run at a time; 0: one per core."""
    unsafe: bool = False
    """Run programs without a sandbox; they can then do whatever you can."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 seconds")
        require(self, "memory_mb", self.memory_mb >= 64, "must be at least 64, or Python does not start")
        require(self, "processes", self.processes >= 0, "must be 0 or more")
        require(self, "disk_mb", self.disk_mb >= 1, "must be at least 1")
        require(self, "workers", self.workers >= 0, "must be 0 (one for each core) or more")

    def check(self, columns: Sequence[str]) -> None:
        """As the base class's; also raises ConfigError if no sandbox works on this machine."""
        super().check(columns)
        self._backend()
        self._pool().start()

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        results = self._results(samples)
        return [one if isinstance(one, Failure) else self._score(one["passed"]) for one in results]

    def explain(self, sample: Sample) -> str:
        """The error of the first test that fails, and the end of the program's output."""
        (result,) = self._results([sample])
        if isinstance(result, Failure):
            return result.reason
        printed = " ".join(result["printed"].split())[-200:]
        return str(result["error"]) + (f"; it printed {printed!r}" if printed else "")

    def close(self) -> None:
        self._pool().close()

    @property
    def warning(self) -> str:
        from grpocli.sandbox.cgroup import parent_group

        if self.unsafe:
            return f"{KEY}.unsafe=true: programs that the model writes run as you, with your files and your network"
        limits = "limits each process of a program, not all together: control groups are not available here"
        return "" if parent_group() else f"{KEY}.memory_mb={self.memory_mb} {limits}"

    def _score(self, passed: Sequence[bool]) -> float:
        if not self.partial or all(passed):
            return self.value(all(passed))
        return self.wrong + (self.right - self.wrong) * sum(passed) / len(passed)

    def _results(self, samples: Sequence[Sample]) -> list[Any]:
        """A `SubmissionResult` as a dict, or a Failure, for each sample."""
        backend = self._backend()
        given = [_given(sample, self.answer_column) for sample in samples]
        return self._pool().map([[one, self._limits, backend, self.python] for one in given])

    @property
    def _limits(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("timeout", "memory_mb", "processes", "disk_mb")}

    def _backend(self) -> str:
        from grpocli.sandbox.sandbox import Limits

        return working_backend(self.python, Limits(**self._limits), self.unsafe)

    def _pool(self) -> WorkerPool:
        from grpocli.sandbox.sandbox import MAX_SLOWDOWN, MOST_TIMEOUTS

        # the sandbox enforces the time limit, also without a program; the pool's timeout is for a sandbox that hangs
        longest = 2 * self.timeout * MAX_SLOWDOWN * MOST_TIMEOUTS
        return shared_pool("grpocli.rewards.code:run_submission", self.workers, longest + 30)


@lru_cache(maxsize=8)
def working_backend(python: str | None, limits: Limits, unsafe: bool) -> str:
    """The name of the sandbox backend; "none" if `unsafe`. Raises ConfigError if no backend works."""
    from grpocli.sandbox.backends import select_backend
    from grpocli.sandbox.sandbox import SandboxError

    if unsafe:
        return "none"
    starts = config_errors(OSError, SubprocessError, says="does not start: {}", key=f"{KEY}.python", value=python)
    says, hint = "no sandbox for programs works on this machine ({})", "install bubblewrap or allow user namespaces"
    hint += f", or accept the risk with {KEY}.unsafe=true"
    with starts, config_errors(SandboxError, says=says, why=str, key="reward", value="[code]", hint=hint):
        return select_backend(python, limits)


def _given(sample: Sample, column: str) -> dict[str, str]:
    """The completion, and the example's tests as JSON and other columns that are texts."""
    names = ("before", "setup", "answer", "entry_point")
    texts = {name: text if isinstance(text := sample.columns.get(name), str) else "" for name in names}
    name = texts["entry_point"] or function_name(sample.columns.get("metadata"))
    return {"text": _answer(sample.text), **texts, "tests": json.dumps([sample.columns.get(column), name], default=str)}


def _answer(text: str) -> str:
    """The part of a completion with the program: the last <answer>, unless only the rest has a code block."""
    from grpocli.answers.final_answer import END_TAG, TAG, after_thinking  # slow: its patterns are compiled

    rest = after_thinking(text)
    if not TAG.search(rest):
        return rest
    tagged = END_TAG.split(TAG.split(rest)[-1], maxsplit=1)[0].strip("\n")
    return tagged if BLOCK.search(tagged) or not BLOCK.search(rest) else rest


def run_submission(given: dict[str, str], limits: dict[str, Any], backend: str, python: str | None) -> dict[str, Any]:
    """A `SubmissionResult` as a dict. Runs in a worker process.

    Raises SandboxError if the program could not be run, ValueError for tests that are none.
    """
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import Limits, Submission, run

    tests, before, answer = problem_tests(given["tests"]), given["before"], given["answer"]
    setup, entry_point = "\n".join([*tests.imports, given["setup"]]), ROOT.split(given["entry_point"])[0]
    if "Solution" in tests.names and "class Solution" in answer:
        entry_point = "Solution"  # the name of a method alone is none of the module's
    code = program(given["text"], (tests.names - symbols(setup)[0] | {entry_point}) - {""}, before)
    known = (before + answer, entry_point) if answer else ()
    result = run(Submission(code, tests.cases, setup, *known), Limits(**limits), backend_named(backend, python))
    alone = Submission("", tuple(tests.cases), setup, *known)
    if all(result.passed) and _pass_alone(alone, Limits(**limits), backend, python):
        raise ValueError("its tests cannot fail: they pass without a program")
    return asdict(result)


@lru_cache(maxsize=64)
def _pass_alone(submission: Submission, limits: Limits, backend: str, python: str | None) -> bool:
    """Whether the tests pass without a program, and so test nothing."""
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import run

    return all(run(submission, limits, backend_named(backend, python)).passed)
