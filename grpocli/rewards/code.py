"""reward=[code]: whether the program in a completion passes its tests, in a sandbox."""

from __future__ import annotations

import builtins
import json
import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpocli.answers.final_answer import END_TAG, TAG, after_thinking
from grpocli.config.parts import UserCode, part, require
from grpocli.errors import ConfigError
from grpocli.rewards.code_text import BLOCK, function_name, problem_tests, program, symbols
from grpocli.rewards.reward import Correctness, Failure, Sample, Score
from grpocli.rewards.worker_pool import WorkerPool, shared_pool

if TYPE_CHECKING:
    from grpocli.sandbox.sandbox import Limits, Submission

KEY = "reward.code"
WRONG = ("0.7316854019", "None", "0")
"""What functions return so that a test fails for one of them: true, without a meaning, and false as a number."""
ROOT = re.compile(r"\W")
"""What ends the name in `Solution().method`, which tests take from the program."""


@part("reward", "code", package="reward.code")
class CodeReward(Correctness):
    """`right` (1) if the program in a completion passes all of the example's tests, else `wrong` (0).

    The program is the last fenced block of Python that defines a name of the tests, after what it uses of the other
    blocks or, without a block, the first lines that are Python. It runs in a sandbox (docs/rewards.md) and its tests
    run in another; results reach the tests as plain values. A program that could not be run, or whose tests cannot
    fail, is a failure, not a 0.

    Further columns that an example may have: `before`, code before the program; `setup`, code before the tests;
    `answer`, a right program, whose other names tests may use; `entry_point`, the name of the function to write.
    """

    scores_independently = True
    solution_column = "answer"
    answer_column: str = "tests"
    """Column with the tests: Python code, objects with `input` and `output`, or a list, also as JSON text."""
    partial: bool = False
    """Score the share of the tests that pass, between `wrong` and `right`. Tests after one that hangs or ends the
    program run with a new program."""
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
        results: list[Any] = [_submission(sample, self.answer_column) for sample in samples]
        valid = [i for i, submission in enumerate(results) if not isinstance(submission, Failure)]
        items = [[results[i], self._limits, backend, self.python, self.partial] for i in valid]
        for i, result in zip(valid, self._pool().map(items), strict=True):
            results[i] = result
        return results

    @property
    def _limits(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("timeout", "memory_mb", "processes", "disk_mb")}

    def _backend(self) -> str:
        from grpocli.sandbox.sandbox import Limits

        return working_backend(self.python, Limits(**self._limits), self.unsafe)

    def _pool(self) -> WorkerPool:
        from grpocli.sandbox.sandbox import MAX_SLOWDOWN, MOST_TIMEOUTS

        # the sandbox enforces the time limit, also without a program; the pool's timeout is for a sandbox that hangs
        longest = (1 + len(WRONG)) * self.timeout * MAX_SLOWDOWN * (MOST_TIMEOUTS + 2 * self.partial)
        return shared_pool("grpocli.rewards.code:run_submission", self.workers, longest + 30)


@lru_cache(maxsize=8)
def working_backend(python: str | None, limits: Limits, unsafe: bool) -> str:
    """The name of the sandbox backend; "none" if `unsafe`. Raises ConfigError if no backend works."""
    from grpocli.sandbox.backends import select_backend
    from grpocli.sandbox.sandbox import SandboxError

    if unsafe:
        return "none"
    try:
        return select_backend(python, limits)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"does not start: {error}", key=f"{KEY}.python", value=python) from error
    except SandboxError as error:
        raise ConfigError(
            f"no sandbox for programs works on this machine ({error})",
            key="reward",
            value="[code]",
            hint=f"install bubblewrap or allow user namespaces, or accept the risk with {KEY}.unsafe=true",
        ) from error


def _submission(sample: Sample, column: str) -> dict[str, Any] | Failure:
    columns = sample.columns
    tests = columns.get(column)
    if not isinstance(tests, str | list | tuple | dict) or not tests:
        return Failure(f"the example has no tests in the column {column!r}: a text or a list of texts")
    optional = {"before": "before", "setup": "setup", "reference": "answer", "entry_point": "entry_point"}
    texts = {name: columns[own] for name, own in optional.items() if isinstance(columns.get(own), str)}
    name = texts.get("entry_point") or function_name(columns.get("metadata"))
    return {"text": _answer(sample.text), **texts, "tests": json.dumps([tests, name])}


def _answer(text: str) -> str:
    """The part of a completion with the program: the last <answer>, unless only the rest has a code block."""
    rest = after_thinking(text)
    if not TAG.search(rest):
        return rest
    tagged = END_TAG.split(TAG.split(rest)[-1], maxsplit=1)[0].strip("\n")
    return tagged if BLOCK.search(tagged) or not BLOCK.search(rest) else rest


def run_submission(
    submission: dict[str, Any], limits: dict[str, Any], backend: str, python: str | None, all_tests: bool
) -> dict[str, Any]:
    """A `SubmissionResult` as a dict, of the tests that can fail. Runs in a worker process.

    Raises SandboxError if the program could not be run, ValueError for tests that are none.
    """
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import Limits, Submission, run

    tests = problem_tests(submission["tests"])
    setup = "\n".join([*tests.imports, submission.get("setup", "")])
    submission |= {"tests": tuple(tests.cases), "setup": setup}
    submission["entry_point"] = ROOT.split(submission.get("entry_point", ""))[0]
    if "Solution" in tests.names and "class Solution" in submission.get("reference", ""):
        submission["entry_point"] = "Solution"  # the name of a method alone is none of the module's
    names = tests.names - symbols(setup)[0]
    if (block := program(submission["text"], (names | {submission["entry_point"]}) - {""})) is not None:
        submission |= {"text": "\n" + block, "whole": True}
    given = Submission(**submission)
    result = run(given, Limits(**limits), backend_named(backend, python), all_tests)
    if all(result.passed) or (all_tests and any(result.passed)):
        can_fail = [False] * len(result.passed)
        for value in WRONG:
            wrong = "\n".join(f"def {name}(*_, **__): return {value}" for name in sorted(names - {*dir(builtins)}))
            failed = _failed(replace(given, text=wrong, whole=True), Limits(**limits), backend, python)
            can_fail = [one or other for one, other in zip(can_fail, failed, strict=True)]
            if all(can_fail):
                break
        if not any(can_fail):
            raise ValueError("its tests cannot fail: functions that return another value pass them")
        result = replace(result, passed=[one for one, counts in zip(result.passed, can_fail, strict=True) if counts])
    return asdict(result)


@lru_cache(maxsize=64)
def _failed(submission: Submission, limits: Limits, backend: str, python: str | None) -> tuple[bool, ...]:
    """Whether each test fails; one that a wrong program passes tests nothing."""
    from grpocli.sandbox.backends import backend_named
    from grpocli.sandbox.sandbox import run

    return tuple(not one for one in run(submission, limits, backend_named(backend, python)).passed)
