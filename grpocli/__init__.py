"""grpocli: train language models with reinforcement learning from verifiable rewards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from grpocli.version import __version__

if TYPE_CHECKING:
    from grpocli.algorithm import Algorithm
    from grpocli.tracking.callbacks import Callback, StopTraining

__all__ = ["Callback", "StopTraining", "__version__", "build_algorithm"]


def __getattr__(name: str) -> Any:
    """The names of callbacks, imported when they are used."""
    if name in ("Callback", "StopTraining"):
        return getattr(importlib.import_module("grpocli.tracking.callbacks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_algorithm(*overrides: str) -> Algorithm:
    """Compose an algorithm for use in your own trainer.

    >>> algo = build_algorithm("algorithm=dapo", "algorithm.objective.high=0.3")

    The overrides are those of the command line, without a config file. See `Algorithm.advantages` and `Algorithm.loss`.
    Raises ConfigError, naming the key, for an unknown key, choice or value.
    """
    from grpocli.composition.compose import build_algorithm as build

    return build(*overrides)
