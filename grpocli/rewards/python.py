"""reward=[python]: a function of the user, called as TRL calls reward functions."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from omegaconf import MISSING

from grpocli.config.parts import UserCode, nearest, part, require
from grpocli.config.user_code import check_exists, load, short
from grpocli.errors import ConfigError
from grpocli.processes.deadline import within
from grpocli.rewards.reward import BaseReward, Failure, Overrun, Sample, Score, as_score
from grpocli.rewards.worker_pool import WorkerPool
from grpocli.user_frames import raised

TRL_ONLY = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes to a reward function and grpocli does not."""
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
    """Seconds for a call."""
    process: bool = False
    """Run the function in a separate process, which is killed at the timeout; arguments are JSON values."""
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
        def refused(problem: str, hint: str = "") -> ConfigError:
            return ConfigError(problem, key=self.key, value=self.function, hint=hint)

        function = load(self.function, self.key)
        if isinstance(function, type):
            name = short(self.function)
            raise refused(
                f"is a class; one derived from BaseReward is chosen as reward=[{name}], others need a function"
            )
        given = {"prompts", "completions", "completion_ids", *columns}
        if self.per_group and SCORES in given:
            problem = f"passes the scores of the other rewards as {SCORES!r}, which is also a column of the task"
            raise ConfigError(problem, key=f"{self.config_key}.per_group", value="true", hint="rename the column")
        given |= {SCORES} if self.per_group else set()
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise refused(f"is called with keyword arguments, but {name!r} before `/` is positional only")
            if name == SCORES and name not in given:
                hint = f"set {self.config_key}.per_group=true"
                raise refused(f"takes {SCORES!r}, which only a call for each group passes", hint)
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if parameter.default is not inspect.Parameter.empty or parameter.kind in variable or name in given:
                continue
            if name in TRL_ONLY:
                raise refused(
                    f"needs TRL's argument {name!r}, which grpocli does not pass: give it a default, {name}=None"
                )
            raise refused(f"needs {name!r}, but the task has no such column{nearest(name, given)}")

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        result = self._in_process(samples) if self.process else self._within_time(samples)
        return [result] * len(samples) if isinstance(result, Failure) else result

    def close(self) -> None:
        self._pool.close()

    def _within_time(self, samples: Sequence[Sample]) -> list[Score] | Failure:
        """The scores of a call in this process. The timeout includes reading the result, which may be lazy."""
        function, given = load(self.function, self.key), self._arguments(samples)
        late = f"no answer within {self.timeout:g} s ({self.config_key}.timeout)"
        remedy = f"{self.config_key}.process=true runs it in a process that can be killed"
        return within(self.timeout, late, lambda: _scores(_called(function, given), len(samples)), remedy)

    def _in_process(self, samples: Sequence[Sample]) -> list[Score] | Failure:
        from grpocli.rewards.isolate_state import seed_for

        given = json.loads(json.dumps(self._arguments(samples), default=str))
        (result,) = self._pool.map([[self.function, self.key, seed_for(samples), given]])
        if isinstance(result, Overrun) and result.late:
            return Failure(f"{result.reason} ({self.config_key}.timeout)")
        if isinstance(result, Failure):
            return result
        return _scores(result, len(samples))

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        scores = {name: [sample.scores[name] for sample in samples] for name in samples[0].scores}
        return arguments(samples) | ({SCORES: scores} if self.per_group else {})

    @cached_property
    def _pool(self) -> WorkerPool:
        return WorkerPool("grpocli.rewards.python:call_in_worker", 1, self.timeout, variables=os.environ)


def call_in_worker(spec: str, key: str, seed: int, given: dict[str, Any]) -> Any:
    """The function's result, as JSON values. Raises RuntimeError if it raises. Runs in a worker process."""
    try:
        function = load(spec, key)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        result = _called(function, given)
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"it raised {raised(error)}") from error
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        return result
    return [float(score) if hasattr(score, "__float__") else score for score in result]


def _scores(result: Any, count: int) -> list[Score] | Failure:
    """The `count` scores that a function returned."""
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        return Failure(f"it returned {result!r}, expected a list of numbers")
    if len(result) != count:
        return Failure(f"it returned {len(result)} values for {count} samples")
    return [as_score(value) for value in result]


def _called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    result = function(**_accepted(function, given))
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def arguments(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The keyword arguments of a TRL reward function. A column that a sample lacks is None for it."""
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    return {
        **{name: [s.columns.get(name) for s in samples] for name in columns},
        "prompts": [s.prompt for s in samples],
        "completions": [s.completion for s in samples],
        "completion_ids": [list(s.token_ids) for s in samples],
    }


def _accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return given
    names = {p.name for p in parameters}
    return {name: values for name, values in given.items() if name in names}
