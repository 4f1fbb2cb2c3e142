"""Algorithms and configs that tests share, which are composed where they must be, and the errors of their keys."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from grpocli import build_algorithm
from grpocli.algorithm import Algorithm
from grpocli.composition.compose import compose, save
from grpocli.composition.resume import Resume
from grpocli.errors import ConfigError

OF_PART = re.compile(r"algorithm\.(\w+\.)?\w+")
_composed = functools.cache(build_algorithm)


@functools.cache
def built(*overrides: str) -> Algorithm:
    """The algorithm of `build_algorithm`. Choices are composed once; keys of their parts are set without composing."""
    parsed = {text: OverridesParser.create().parse_override(text) for text in overrides}
    keys = {text: one for text, one in parsed.items() if OF_PART.fullmatch(one.key_or_group)}
    algorithm = _composed(*(text for text in overrides if text not in keys))
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for one in keys.values():
        *part, name = one.key_or_group.split(".")[1:]
        values["".join(part)][name] = one.value()
    for part, given in values.items():
        owner = getattr(algorithm, part) if part else algorithm
        known = {field.name: field for field in fields(owner)}
        made = replace(owner, **{name: _typed(known[name], value) for name, value in given.items()})
        algorithm = replace(algorithm, **{part: made}) if part else made
    return algorithm


def _typed(field: Field[Any], value: Any) -> Any:
    """A value as composing makes it: `1` and `.inf` are floats in a field of floats."""
    return float(str(value).removeprefix(".")) if "float" in str(field.type) and value is not None else value


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


@contextmanager
def refused(key: str, match: str | None = None) -> Iterator[None]:
    """Asserts an error of one line that names the key."""
    with pytest.raises(ConfigError, match=match) as caught:
        yield
    assert (caught.value.key, "\n" in str(caught.value)) == (key, False), caught.value
