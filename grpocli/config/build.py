"""Builds live objects from a composed config. `_target_` names the class that a mapping's other keys are passed to.

A name is a choice (`reward/math`), a section (`train`), or a part of the user (`FILE.py:CLASS`, `module:CLASS`). It is
independent of the source tree, so saved configs still build after a class moves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.config.environment import unresolved
from grpocli.config.parts import CLASSES, nearest
from grpocli.config.user_code import is_spec, raised, user_class
from grpocli.config.yaml_text import TARGET
from grpocli.errors import ConfigError, config_errors


def build(config: DictConfig) -> Any:
    """Build the live objects of a composed config.

    Raises ConfigError for a value that a part refuses, a missing one, or a broken interpolation.
    """
    with config_errors(OmegaConfBaseException, why=unresolved):
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise ConfigError("has no value", key=missing[0], hint=f"set {missing[0]}=...")
        plain = OmegaConf.to_container(config, resolve=True)
        key = str(config._get_full_key(None))
    return _built(plain, key)


def _built(value: Any, key: str) -> Any:
    """The live object of a plain value. key: its key in the config."""
    if isinstance(value, list):
        return [_built(one, f"{key}[{i}]") for i, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    inner = {name: _built(one, f"{key}.{name}".lstrip(".")) for name, one in value.items()}
    target = inner.pop(TARGET, None)
    return inner if target is None else _construct(str(target), inner, key)


def _construct(target: str, values: dict[str, Any], key: str) -> Any:
    """An object of the class named `target`, whose arguments are `values`. key: its key in the config."""
    cls = CLASSES.get(target)
    if cls is None:
        if not is_spec(target):
            hint = "name a choice or FILE.py:CLASS, or install the package that registers it"
            raise ConfigError("no choice has this name", key=f"{key}.{TARGET}".lstrip("."), value=target, hint=hint)
        cls = user_class(target, key)
    if dataclasses.is_dataclass(cls):  # a mixture is none, its keys are its tasks
        names = [f.name for f in dataclasses.fields(cls) if f.init]
        if unknown := [name for name in values if name not in names]:
            raise ConfigError(f"there is no key {f'{key}.{unknown[0]}'.lstrip('.')}{nearest(unknown[0], names)}")
    try:
        with config_errors(Exception, why=raised, key=key):
            return cls(**values)
    except ConfigError as error:
        class_key = getattr(cls, "config_key", "")
        if class_key == key or not f"{error.key}.".startswith(f"{class_key}."):
            raise
        raise error.with_key(key + error.key.removeprefix(class_key)) from error  # `task.gsm8k.path` in a mixture
