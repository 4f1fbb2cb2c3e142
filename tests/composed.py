"""Algorithms and configs that tests share; composing a config takes a quarter of a second, so algorithms are kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from grpocli import build_algorithm
from grpocli.composition.compose import compose, save
from grpocli.composition.resume import Resume

built = functools.cache(build_algorithm)


def begun(folder: Path, *overrides: str, defaults: Sequence[str] = ()) -> DictConfig:
    """The config of a run, saved in its folder. defaults: choices that were defaults then, so it names none of them."""
    config = compose([*overrides, *defaults])
    config.overrides = list(overrides)
    (folder / "config.yaml").write_text(save(config))
    return config


def again(folder: Path, *given: str) -> DictConfig:
    """The config of a resume of that run with these overrides."""
    resume = Resume(folder, list(given))
    return resume.merged(compose([o for o in resume.overrides([]) if not o.startswith(("resume", "hydra"))]))
