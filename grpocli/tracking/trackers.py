"""tracker=NAME: dashboards, through accelerate's trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from grpocli.config.parts import one_of, part
from grpocli.errors import ConfigError

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "comet_ml": "comet_ml",
    "aim": "aim",
    "mlflow": "mlflow",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
}


class LiveTracker(Protocol):
    """A dashboard that is being written."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


@part("tracker", "none")
class NoTracker:
    """metrics.jsonl alone."""

    def start(self, name: str, folder: Path, config: Any) -> LiveTracker | None:
        return None


@part("tracker", "accelerate")
class Accelerate:
    """One of accelerate's trackers, by `kind`; `tracker=wandb` and so on choose one.

    project: what runs are filed under. options: further arguments of the tracker's own start.
    """

    kind: str = "tensorboard"
    project: str = "grpocli"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of(self, "kind", PACKAGES)

    def start(self, name: str, folder: Path, config: Any) -> LiveTracker | None:
        """Raises ConfigError where its package is not installed."""
        if find_spec(PACKAGES[self.kind]) is None:
            raise ConfigError.of(
                "tracker", self.kind, f"the package is not installed: pip install {PACKAGES[self.kind]}"
            )
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        make = LOGGER_TYPE_TO_CLASS[self.kind]
        where = {"logging_dir": str(folder)} if make.requires_logging_directory else {}
        tracker = make(self.project, **where, **self.options)
        if hasattr(tracker, "start"):
            tracker.start()
        tracker.store_init_configuration(flat(config))
        return AccelerateTracker(tracker)


class AccelerateTracker:
    """A GeneralTracker of accelerate's, given the numbers among grpocli's metrics."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._tracker.log({k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=step)

    def finish(self) -> None:
        self._tracker.finish()


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; lists and nulls as text, which is all that some dashboards take."""
    if not isinstance(node, dict):
        return {prefix: node if isinstance(node, int | float | str | bool) else str(node)}
    rows: dict[str, Any] = {}
    for name, value in node.items():
        rows |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return rows
