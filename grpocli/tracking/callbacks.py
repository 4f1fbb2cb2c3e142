"""callbacks=[FILE.py:CLASS]: code of the user that a run calls at its steps, evaluations and checkpoints.

Only the main process calls it, with copies of plain data. An error in it does not end the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config.parts import nearest
from grpocli.config.user_code import keep_random_state, load, raised, short
from grpocli.errors import ConfigError, config_errors
from grpocli.runs.metrics import to_json

logger = logging.getLogger(__name__)

KEY = "callbacks"
HOOKS = ("on_", "before_", "after_")
"""How the names of the methods begin that a run calls."""
COMPLETIONS = 8
"""Most completions of a step that callbacks see; the step's rollout file has all."""


class StopTraining(Exception):
    """Raised in a callback to end the run as if its last step were done: evaluation, checkpoint, final model."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a session."""

    folder: Path
    """The run's."""
    config: Mapping[str, Any]
    """Its config.yaml."""
    steps: int
    """Those to train."""
    done: int
    """Those of earlier sessions."""


@dataclass(frozen=True, slots=True)
class StepCompletion:
    """A completion."""

    prompt: Any
    """Text or messages."""
    completion: str
    rewards: Mapping[str, float]
    """By name."""
    advantage: float


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step that is done."""

    step: int
    metrics: Mapping[str, Any]
    """Those of metrics.jsonl."""
    completions: tuple[StepCompletion, ...]
    """Of the first group it trained on."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation after `step` steps."""

    step: int
    metrics: Mapping[str, Any]
    """Its accuracies, such as `eval/accuracy`."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint that is whole on the disk; checkpoint.keep may delete it later."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a session."""

    step: int
    outcome: str
    """`done`, `stopped` or `failed`."""
    cause: str
    model: Path | None
    """The final model's folder, if done."""


class Callback:
    """Base class of callbacks, whose methods do nothing. A class is made once a session, without arguments."""

    def on_start(self, run: RunStart) -> None:
        """Called once everything is loaded, before the first evaluation or step."""

    def before_step(self, step: int) -> None:
        """Called before a step begins. step: its number, from 1."""

    def after_step(self, step: StepEnd) -> None:
        """Called when a step's metrics and rollouts are written."""

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """Called after an evaluation, also before the first step and after the last."""

    def after_checkpoint(self, checkpoint: CheckpointSaved) -> None:
        """Called when a checkpoint is whole, which may be during the next step."""

    def on_end(self, end: RunEnd) -> None:
        """Called at the end of the session, when the final model or the last checkpoint is written."""


@dataclass(slots=True)
class Callbacks:
    """Calls the callbacks of a run."""

    callbacks: Sequence[tuple[str, Callback]] = ()
    """With their names."""
    show: Callable[[str], None] = lambda text: None
    """Shows what the run waits for."""
    restore: Callable[[], None] = lambda: None
    """Shows what the run did before."""
    warn: Callable[[str], None] = lambda text: None
    failed: set[tuple[str, str]] = field(default_factory=set)
    """Callbacks and their methods whose failure is shown."""
    stop: str = ""
    """Why a callback ends the run."""
    evaluated: int | None = None
    """The step of the last evaluation."""

    def on_start(self, folder: Path, config: Mapping[str, Any], steps: int, done: int) -> None:
        self._call("on_start", RunStart(folder, to_json(config), steps, done))

    def before_step(self, step: int) -> None:
        self._call("before_step", step)

    def after_step(self, step: int, metrics: Mapping[str, Any], completions: Sequence[StepCompletion]) -> None:
        self._call("after_step", StepEnd(step, to_json(metrics), tuple(completions[:COMPLETIONS])))

    def after_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Pass on an evaluation. The last step's is asked for again at the end of a run, and passed on once."""
        results = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if results and self.evaluated != step:
            self.evaluated = step
            self._call("after_evaluation", Evaluation(step, to_json(results)))

    def after_checkpoint(self, step: int, folder: Path) -> None:
        self._call("after_checkpoint", CheckpointSaved(step, folder))

    def on_end(self, end: RunEnd) -> None:
        self._call("on_end", end)

    def _call(self, method: str, event: object) -> None:
        for name, callback in self.callbacks:
            if getattr(type(callback), method) is getattr(Callback, method):
                continue
            self.show(f"callback {name}, {method}")
            try:
                with keep_random_state():
                    getattr(callback, method)(event)
            except StopTraining as asked:
                reason = " ".join(str(asked).split()) or "without a reason"
                self.stop = self.stop or f"the callback {name} ends the run: {reason}"
                logger.info(self.stop)
            except (Exception, SystemExit) as error:
                problem = f"the callback {name} failed in {method}: {raised(error)}"
                if (name, method) not in self.failed:
                    self.failed.add((name, method))
                    logger.error(problem, exc_info=error)
                    self.warn(f"{problem}; the run goes on")
            finally:
                self.restore()


def make_callbacks(specs: Sequence[str]) -> list[tuple[str, Callback]]:
    """The callbacks of FILE.py:CLASS or module:CLASS, with their names. Raises ConfigError for one that is none."""
    made = []
    for spec in specs:
        make = load(spec, KEY)
        with config_errors(Exception, SystemExit, says="making it raised {}", why=raised, key=KEY, value=spec):
            callback = make()
        _check_class(type(callback), spec)
        made.append((short(spec), callback))
    return made


def check_callback(spec: str) -> None:
    """Raise ConfigError if the code of a callback cannot be imported, or if it is a class of another kind."""
    found = load(spec, KEY)
    if isinstance(found, type):
        _check_class(found, spec)


def _check_class(cls: type[Any], spec: str) -> None:
    """Raise ConfigError for another class, and for a method of a name like `on_x` that no run calls."""
    if not issubclass(cls, Callback):
        raise ConfigError(f"{cls.__name__} does not derive from grpocli.Callback", key=KEY, value=spec)
    known = [name for name in vars(Callback) if name.startswith(HOOKS)]
    for name in {*dir(cls)} - {*known}:
        if name.startswith(HOOKS) and callable(getattr(cls, name)):
            problem = f"a run never calls its method {name}, but {', '.join(known)}{nearest(name, known)}"
            raise ConfigError(problem, key=KEY, value=spec)
