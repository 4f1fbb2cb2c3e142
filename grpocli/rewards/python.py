"""reward=[python]: a function of the user, called as TRL calls reward functions."""

from __future__ import annotations

import inspect
import math
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from struct import pack
from typing import Any

from omegaconf import MISSING

from grpocli.config.parts import UserCode, nearest, part, require
from grpocli.config.user_code import check_exists, load, raised, short
from grpocli.errors import ConfigError, RunError
from grpocli.rewards.reward import BaseReward, Failure, Overrun, Sample, Score, as_score, seed_for
from grpocli.rewards.worker_pool import WorkerPool

IDS = "completion_ids"
Parameter = tuple[str, str, bool]
"""Name and kind of a function's parameter, and whether a call has to give it."""
SCORES = "scores"
"""The argument that a function gets with `per_group`. TRL does not pass it."""


@part("reward", "python", package="reward.python")
class PythonReward(BaseReward):
    """A function of the user, plain or async.

    Its keyword arguments are those in its signature, of `prompts`, `completions` (strings, or lists of messages for
    conversational data), `completion_ids`, and every column of the dataset as a list. It returns a list of numbers,
    with None for a sample to which it does not apply.

    With `per_group` it is called once for each group, after the other rewards, and may also take `scores`: their scores
    of the group's samples, as {name: list}.

    `reward=[FILE.py:NAME,FILE.py:OTHER]` takes several, each under its own name.
    """

    checks_answers = True
    function: UserCode = MISSING
    """FILE.py:NAME or module:NAME."""
    timeout: float = 300.0
    """Seconds for a call in a process of its own."""
    process: bool = True
    """Call the function in a process of its own, which lives as long as the run and is killed at the timeout. false:
    call it in the trainer process, without a time limit, as TRL does."""
    per_group: bool = False
    """Call the function once for each group, with the scores of the run's other rewards as `scores`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "function", ":" in self.function, "must be FILE.py:NAME or module:NAME")
        require(self, "timeout", 0 < self.timeout < math.inf, "must be above 0 seconds")

    @property
    def sees_group(self) -> bool:  # type: ignore[override]
        return self.per_group

    @property
    def label(self) -> str:
        return short(self.function)

    @property
    def key(self) -> str:
        """The config key of `function` in this run: `reward.NAME.function`."""
        return f"{self.config_key}.function"

    def check_ready(self) -> None:
        check_exists(self.function, self.key)

    def check(self, columns: Sequence[str]) -> None:
        given = {"prompts", "completions", IDS, *columns, *([SCORES] if self.per_group else [])}
        problem, hint = "", ""
        if self._parameters is None:
            problem = f"is a class; one derived from BaseReward is chosen as reward=[{short(self.function)}]"
        for name, _, required in self._parameters or ():
            if name == SCORES and name not in given:
                problem = f"takes {SCORES!r}, which only a call for each group passes"
                hint = f"set {self.config_key}.per_group=true"
            elif required and name not in given:
                problem = f"needs {name!r}, but the task has no such column{nearest(name, given)}"
        if problem:
            raise ConfigError(problem, key=self.key, value=self.function, hint=hint)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        given, parameters = arguments(samples), self._parameters or ()
        if self.per_group:
            given[SCORES] = {name: [sample.scores[name] for sample in samples] for name in samples[0].scores}
        if not any(kind == "VAR_KEYWORD" for _, kind, _ in parameters):
            given = {name: given[name] for name, _, _ in parameters if name in given}
        if not self.process:
            return scores_of(load(self.function, self.key), given, len(samples))
        if IDS in given:
            given[IDS] = [pack(f"{len(one)}i", *one) for one in given[IDS]]  # faster to pickle than lists
        item = ["scores", self.function, self.key, seed_for(samples), len(samples), pickle.dumps(given)]
        (found,) = self._pool.map([item])
        if isinstance(found, Failure):
            late = isinstance(found, Overrun) and found.late
            return [Failure(f"{found.reason} ({self.config_key}.timeout)") if late else found] * len(samples)
        return [Failure(one) if isinstance(one, str) else one for one in found]

    def close(self) -> None:
        self._pool.close()

    @cached_property
    def _parameters(self) -> list[Parameter] | None:
        """The function's parameters; None for a class. Raises ConfigError if it cannot be imported."""
        if not self.process:
            return parameters_of(load(self.function, self.key))
        try:
            (found,) = self._pool.map([self._pool.first])
        except RunError as error:
            raise ConfigError(f"importing it failed: {error}", key=self.key, value=self.function) from error
        if isinstance(found, Failure):
            raise ConfigError(found.reason, key=self.key, value=self.function)
        parameters: list[Parameter] | None = found
        return parameters

    @cached_property
    def _pool(self) -> WorkerPool:
        function, first = "grpocli.rewards.python:in_worker", ["parameters", self.function, self.key, time.time()]
        return WorkerPool(function, 1, self.timeout, variables=os.environ, trusted=True, first=first)


def in_worker(kind: str, spec: str, key: str, *given: Any) -> Any:
    """The parameters of a function or its scores, as JSON values; a text says why a sample has no score.

    Runs in a worker process.
    """
    try:
        function = load(spec, key)
    except ConfigError as error:
        raise RuntimeError(error.problem) from error
    if kind == "parameters":
        file = Path(spec.rpartition(":")[0]).expanduser()
        if file.suffix == ".py" and file.stat().st_mtime > given[0]:
            print(f"{short(spec)} has changed since the run began; a new process runs it as it is now", file=sys.stderr)
        return parameters_of(function)
    seed, count, pickled = given
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    try:
        arguments = pickle.loads(pickled)  # noqa: S301 - by the trainer
        if IDS in arguments:
            arguments[IDS] = [memoryview(one).cast("i").tolist() for one in arguments[IDS]]
        scores = scores_of(function, arguments, count)
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"it raised {raised(error)}") from error
    return [one.reason if isinstance(one, Failure) else one for one in scores]


def parameters_of(function: Callable[..., Any]) -> list[Parameter] | None:
    """Name and kind of each parameter of a function, and whether a call has to give it; None for a class."""
    if isinstance(function, type):
        return None
    kinds = inspect.Parameter
    return [
        (name, one.kind.name, one.default is kinds.empty and one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD))
        for name, one in inspect.signature(function).parameters.items()
    ]


def scores_of(function: Callable[..., Any], given: Mapping[str, Any], count: int) -> list[Score]:
    """The `count` scores that a function returns, plain or async; Failures if it returns something else."""
    result = function(**given)
    if inspect.isawaitable(result):
        import asyncio  # slow

        result = asyncio.run(_awaited(result))
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        return [Failure(f"it returned {result!r}, expected a list of numbers")] * count
    if len(result) != count:
        return [Failure(f"it returned {len(result)} values for {count} samples")] * count
    return [as_score(value) for value in result]


async def _awaited(result: Any) -> Any:
    return await result


def arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """The keyword arguments of a TRL reward function. A column that a sample lacks is None for it."""
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    return {
        **{name: [s.columns.get(name) for s in samples] for name in columns},
        "prompts": [s.prompt for s in samples],
        "completions": [s.completion for s in samples],
        IDS: [list(s.token_ids) for s in samples],
    }
