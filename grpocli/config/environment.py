"""Saving configs: values from environment variables, which may be secrets, stay interpolations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from grpocli.text import mask

SECRET = re.compile(r"key|token|secret|pass|cred|auth", re.IGNORECASE)
"""Matches names of variables with secret values. Other values, such as a job's number, stay readable in errors."""
OVERRIDES = "overrides"
"""The key with the command line, which is saved as typed."""


def without_environment(config: DictConfig) -> dict[Any, Any]:
    """The config as plain values, resolved except for values that come from the environment."""
    with _reads() as names:
        return {key: raw_value(config, OVERRIDES) if key == OVERRIDES else _plain(config, key, names) for key in config}


def unresolved(error: OmegaConfBaseException) -> str:
    """A sentence about an interpolation that OmegaConf cannot resolve, parsed from its message."""
    text = str(error)
    variable = re.search(r"Environment variable '(.*)' not found", text)
    key = re.search(r"full_key: (\S+)", text)
    if not variable:
        return text.splitlines()[0]
    return (
        f"{key[1] if key else 'the config'} needs the environment variable {variable[1]}, which is not set: export it"
    )


def raw_value(node: DictConfig | ListConfig, key: Any) -> Any:
    """The plain value of a key, with unresolved interpolations."""
    return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]


def mode_of(text: str) -> int:
    """The mode of a file with this saved YAML: private if it names environment variables."""
    return 0o600 if "oc.env" in text else 0o644


def _plain(node: DictConfig | ListConfig, key: Any, names: list[str]) -> Any:
    """The value of a key, or its interpolation if that reads the environment or has `${` in its result."""
    if OmegaConf.is_missing(node, key):
        return "???"
    if not OmegaConf.is_interpolation(node, key):
        return _contents(node[key], names)
    raw = raw_value(node, key)
    before = len(names)
    try:
        value = _contents(node[key], names)
    except OmegaConfBaseException:
        if len(names) == before:
            raise
        return raw  # its variable is not set
    return raw if len(names) > before or (isinstance(value, str) and "${" in value) else value


def _contents(value: Any, names: list[str]) -> Any:
    if isinstance(value, DictConfig):
        return {key: _plain(value, key, names) for key in value}
    if isinstance(value, ListConfig):
        return [_plain(value, index, names) for index in range(len(value))]
    return value


@contextmanager
def _reads() -> Iterator[list[str]]:
    """Collect the names of environment variables that interpolations read within the block."""
    names: list[str] = []

    def env(name: str, *default: Any) -> Any:
        names.append(name)
        return _env(name, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield names
    finally:
        OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def _env(name: str, *default: Any) -> Any:
    """OmegaConf's resolver, which also masks secrets in the output from then on."""
    if name in os.environ and SECRET.search(name):
        mask(os.environ[name], f"${{oc.env:{name}}}")
    return oc.env(name, *default)


OmegaConf.register_new_resolver("oc.env", _env, replace=True)
