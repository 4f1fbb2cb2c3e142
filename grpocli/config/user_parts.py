"""Classes and functions of users as choices: `algorithm/advantage=FILE.py:CLASS`, `reward=[FILE.py:NAME]`.

The class is a dataclass with or without `@part`, and its fields are typed keys. A plain function is a reward, called as
by `reward=[python]`. A config source of Hydra's (`composition/hydra_sources.py`) resolves them, so they work wherever
choices do: in overrides, lists, sweeps and recipes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpocli.config.parts import BASES, CLASSES, config_node, section, target_of
from grpocli.config.user_code import load, short
from grpocli.errors import ConfigError, config_errors

SPEC = re.compile(r"(?:[^:=\[\]{},]+|.+\.py):[A-Za-z_]\w*")
"""FILE.py:NAME or module:NAME."""
GROUP = re.compile(r"algorithm/\w+|engine|hardware|model|optim|reward|sync|task|tracker")
"""The config groups that accept parts of users."""
CHOICE = re.compile(rf"({GROUP.pattern})/({SPEC.pattern})")
ATTRIBUTE = None
REQUIRED_MEMBERS: Mapping[str, Mapping[str, str | None]] = {
    "algorithm/advantage": {"__call__": "scores"},
    "algorithm/aggregate": {"__call__": "mask group_ids totals"},
    "algorithm/correction": {"__call__": "old_logp rollout_logp mask"},
    "algorithm/entropy": {"__call__": "entropy"},
    "algorithm/keep": {"__call__": "rewards"},
    "algorithm/kl": {"__call__": "logp old_logp ref_logp"},
    "algorithm/objective": {"__call__": "logp old_logp advantages mask"},
    "algorithm/question_weight": {"__call__": "scores accuracy"},
    "algorithm/tokens": {"__call__": "entropy mask"},
    "engine": {"launch": "job", "connect": "context"},
    "model": {"prepare": "report", "lora": ATTRIBUTE, "dtype": ATTRIBUTE},
    "optim": {"make": "parameters", "rate": "step total"},
    "reward": {"__call__": "samples"},
    "sync": {"choose": "servers"},
    "task": {"examples": "split"},
    "tracker": {"start": "name folder config done"},
}
"""{group: {member: a method's arguments, or ATTRIBUTE}} that every part of the group must have."""


def is_spec(choice: str) -> bool:
    """Whether a choice names user code."""
    return SPEC.fullmatch(choice) is not None


def name_of(choice: str) -> str:
    """The name of a choice in a config; for user code the function's name, or the class's in snake case."""
    if not is_spec(choice):
        return choice
    name = choice.rpartition(":")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() if name[:1].isupper() else name


def choice_of(group: str, part: object) -> str:
    """The choice that builds a part: its registered name, FILE.py:CLASS for user code, or an import path."""
    target = target_of(type(part))
    return short(target) if is_spec(target) else target.removeprefix(f"{group}/")


def config_of(group: str, spec: str) -> tuple[DictConfig, str]:
    """The typed config of FILE.py:NAME, and the package of its keys. Raises ConfigError if it is no part."""
    package = f"reward.{name_of(spec)}" if group == "reward" else group.replace("/", ".")
    found = load(spec, group)
    if not isinstance(found, type):
        if group != "reward":
            calls = [f"{name}({', '.join(a.split())})" for name, a in REQUIRED_MEMBERS[group].items() if a is not None]
            problem = f"is a function, which only reward= accepts; give a class with {', '.join(calls)}"
            raise ConfigError(problem, key=group, value=spec)
        config = config_node(CLASSES["reward/python"])
        config.function = spec
        return config, package
    says = "has a field that cannot be a config key: {}"
    with config_errors(OmegaConfBaseException, says=says, key=group, value=spec):
        return config_node(_as_part(found, group, spec, package)), package


def user_class(spec: str, key: str) -> type[Any]:
    """The class FILE.py:CLASS as a part whose keys are below `key`. Raises ConfigError if it cannot be one."""
    first, *rest = key.split(".")
    group = f"{first}/{rest[0]}" if first == "algorithm" and rest else first
    cls: Any = load(spec, group)
    return _as_part(cls, group, spec, key if first == "reward" else group.replace("/", "."))


def _as_part(cls: type[Any], group: str, spec: str, key: str) -> type[Any]:
    """The class as a part; a plain class becomes a frozen dataclass. Raises ConfigError if that fails."""
    if "__dataclass_params__" not in cls.__dict__:
        says = "cannot be made a frozen dataclass: {}"  # such as a base that is not frozen, or a mutable default
        with config_errors(TypeError, ValueError, says=says, key=group, value=spec):
            if "__init__" in cls.__dict__:
                raise TypeError("it defines __init__, and its fields would be its keys")
            section(key)(cls)
    if "config_key" not in cls.__dict__:
        cls.config_key = key
    cls.config_target = spec
    check_members(cls, group, spec)
    return cls


def check_members(cls: type[Any], group: str, spec: str) -> None:
    """Raise ConfigError unless the class has the base and the members of its group."""
    base = BASES.get(group, object)
    if not issubclass(cls, base):
        raise ConfigError(f"must derive from {base.__module__}.{base.__qualname__}", key=group, value=spec)
    members = {f.name for f in dataclasses.fields(cls)}.union(*map(vars, cls.__mro__))
    if missing := [name for name in REQUIRED_MEMBERS.get(group, {}) if name not in members]:
        raise ConfigError(f"must define {' and '.join(missing)}, as every choice of {group}=", key=group, value=spec)
