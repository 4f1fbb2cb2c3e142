"""tracker=NAME: dashboards, through accelerate's trackers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpocli.config.parts import one_of, part
from grpocli.config.user_code import raised
from grpocli.config.yaml_text import leaves
from grpocli.errors import ConfigError, config_errors
from grpocli.runs.metrics import to_json

logger = logging.getLogger(__name__)


TRACKERS: dict[str, dict[str, str]] = {
    "tensorboard": {},
    "wandb": {"name": "name", "folder": "dir"},
    "trackio": {"name": "name"},
    "comet_ml": {},
    "aim": {},
    "mlflow": {"name": "run_name"},
    "clearml": {"name": "task_name"},
    "dvclive": {"folder": "dir"},
    "swanlab": {"name": "experiment_name", "folder": "logdir"},
}
"""{accelerate's name of a tracker and its package: its keyword arguments for the run's name and for a folder}."""


@part("tracker", "none")
class NoTracker:
    """metrics.jsonl alone."""

    def start(self, name: str, folder: Path, config: Any, done: int = 0) -> AccelerateTracker | None:
        return None


@part("tracker", "accelerate")
class Accelerate:
    """One of accelerate's trackers; `tracker=wandb` and the others of this group choose its `kind`."""

    kind: str = "tensorboard"
    """Name of the tracker."""
    project: str = "grpocli"
    """Project that the runs belong to."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the tracker's constructor."""

    def __post_init__(self) -> None:
        one_of(self, "kind", TRACKERS)

    def check_ready(self) -> None:
        """Raise ConfigError if its package is not installed. Imports nothing."""
        if find_spec(self.kind) is None:
            raise ConfigError(f"it is not installed: pip install {self.kind}", key="tracker", value=self.kind)

    def start(self, name: str, folder: Path, config: Any, done: int = 0) -> AccelerateTracker | None:
        """Start the tracker. Raises ConfigError if it fails (not installed, no account, wrong options ...).

        done: steps of the run so far; a resume replaces the later ones.
        """
        self.check_ready()
        with config_errors(Exception, why=raised, key="tracker", value=self.kind):
            tracker = self._make(name, folder, done)
            tracker.start()
            values = leaves(config, lists=False)  # lists and nulls as text, because some dashboards take nothing else
            kinds = int | float | str | bool
            tracker.store_init_configuration({key: v if isinstance(v, kinds) else str(v) for key, v in values})
        return AccelerateTracker(tracker, self.kind)

    def _make(self, name: str, folder: Path, done: int) -> Any:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        known = {"name": name, "folder": str(folder / self.kind)}
        options = {key: known[what] for what, key in TRACKERS[self.kind].items()} | self.options
        make = LOGGER_TYPE_TO_CLASS[self.kind]
        if self.kind == "tensorboard":  # it names runs by folder
            return make("tensorboard", logging_dir=str(folder), **{"purge_step": done and done + 1} | options)
        if self.kind == "aim":  # one repository for all runs, in its default folder, so that they can be compared
            return make(name, **{"logging_dir": ".", "experiment": self.project} | options)
        return make(self.project, **options)


class AccelerateTracker:
    """One of accelerate's trackers, which gets the finite numbers among the metrics.

    A dashboard that fails later does not end the run: the failure is in run.log, the numbers are in metrics.jsonl.
    """

    def __init__(self, tracker: Any, kind: str) -> None:
        self._tracker = tracker
        self._kind = kind
        self._failing = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the finite numbers. Their names have `_at_` for `@`, which MLflow refuses."""
        plain = {name.replace("@", "_at_"): to_json(value) for name, value in metrics.items()}
        numbers = {name: value for name, value in plain.items() if isinstance(value, int | float)}
        self._call(f"step {step} could not be logged", lambda: self._tracker.log(numbers, step=step))

    def finish(self) -> None:
        self._call("it could not be closed", self._tracker.finish)

    def _call(self, problem: str, call: Callable[[], None]) -> None:
        """Call the dashboard. Of failures in a row the first one is logged."""
        try:
            call()
            self._failing = False
        except Exception:
            if not self._failing:
                logger.exception("tracker=%s: %s", self._kind, problem)
            self._failing = True
