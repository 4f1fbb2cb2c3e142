"""Hydra's and OmegaConf's errors as a ConfigError with the key, the value and the nearest valid name.

Both libraries have few error classes and put the details into their messages, so this module parses these messages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

from hydra.core.override_parser.types import Quote
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.hydra_sources import composer, conf_dir
from grpocli.composition.overrides import in_quotes, key_of_override, parse
from grpocli.config.parts import choices_of, nearest, nearest_key, stored
from grpocli.config.yaml_text import TARGET, nodes
from grpocli.errors import ConfigError
from grpocli.plugins import hook

SYNTAX = "write KEY=VALUE or GROUP=[A,B], without spaces beside =; a text with special characters needs two quotes: {}"
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
"""Keys of Hydra's own that users set."""


@contextmanager
def hydra_errors(overrides: list[str], config_name: str) -> Iterator[None]:
    """Raise errors of Hydra and OmegaConf within the block as ConfigError."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError("cannot be read", key=error.override, hint=_syntax(error.override)) from error
    except MissingConfigException as error:
        raise _unknown_choice(str(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error, overrides, config_name) from error


def _explained(error: Exception, overrides: list[str], config_name: str) -> ConfigError:
    """The ConfigError for an error of Hydra's or OmegaConf's."""
    text = str(error)
    if found := re.match(r"Ambiguous value for argument '(.*)'$", text.partition("\n1. ")[0], re.DOTALL):
        key, _, value = found[1].partition("=")
        hint = f"{_syntax(found[1])}; -m tries several values in turn"
        return ConfigError(f"is one value with commas: for a list write '{key}=[{value}]'", key=key, hint=hint)
    if found := re.match(r"Error merging override ([^=]*)=?(.*)", text):
        return ConfigError(str(error.__cause__ or text).splitlines()[0], key=found[1], value=found[2])
    if found := re.match(r"You must specify '([^']+)'", text):
        return ConfigError("has no value", key=found[1], hint=f"set {found[1]}=...")
    found = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text)
    if found := found or re.match(r"Could not (?:override|delete from config\.) '([^'@]+)", text):
        return _unknown_key(found[1], overrides, config_name)
    if text.startswith("In 'reward/") and "Merge error" in text:  # a function with the name of another choice
        return two_of_one_name(choices_in(overrides))
    return ConfigError(_first_paragraph(text))


def two_of_one_name(chosen: str) -> ConfigError:
    """The error for two rewards with the same keys. chosen: their overrides."""
    hint = "add one as +reward@reward.NAME=..., or change `# @package reward.NAME` in a copied YAML"
    return ConfigError("two rewards have one name", key=chosen, hint=hint)


def choices_in(overrides: list[str]) -> str:
    """The overrides that choose for a group."""
    return " ".join(one for one in overrides if "." not in key_of_override(one))


def known_keys(overrides: list[str], config_name: str, hydra: bool = False) -> list[str]:
    """Every key and group of the config that the choices among `overrides` compose, or the keys of Hydra's own."""
    plain = OmegaConf.to_container(_composed_choices(overrides, config_name), resolve=False)
    assert isinstance(plain, dict)
    own = plain.pop("hydra")
    if hydra:
        return [*FOLDERS, *_keys(own, "hydra")]
    return [*_keys(plain), *(f"algorithm/{name}" for name in plain.get("algorithm", {})), "recipe", *FOLDERS]


def _keys(node: object, key: str = "") -> list[str]:
    return [key for key, _ in nodes(node, key, lists=False) if key and not key.endswith(TARGET)]


def _unknown_key(key: str, overrides: list[str], config_name: str) -> ConfigError:
    """The error for a key that belongs to another choice, that is another trainer's, or that has a nearest name."""
    problem, section, name = f"there is no key {key}", *key.rpartition(".")[::2]
    keys, group = known_keys(overrides, config_name, hydra=key.startswith("hydra.")), section.replace(".", "/")
    if section not in keys and section.removeprefix("reward.") in choices_of("reward"):
        return ConfigError(f"{key} belongs to reward=[{section.removeprefix('reward.')}]")
    if having := sorted(choice for choice, node in stored(group).items() if name in [*node.keys()]):
        return ConfigError(f"{key} belongs to {group}={' or '.join(having)}")
    if foreign := hook("foreign_names"):
        value = next((o.partition("=")[2] for o in overrides if key_of_override(o) == key), "VALUE")
        if advice := foreign.key_advice(key, value) or foreign.key_advice(name, value):
            return ConfigError(problem, hint=advice)
    return ConfigError(problem + (nearest_key(key, keys) or "; `grpocli train --cfg job` shows the keys"))


def _unknown_choice(text: str) -> ConfigError:
    found = re.search(r"Could not (?:find|load) '(algorithm/\w+(?=/)|[^'/]+)/([^']+)'", text)
    if not found:
        return ConfigError(_first_paragraph(text))
    group, choice = found.groups()
    if choice.endswith(".py"):
        return ConfigError(f"name a function or class of the file: {choice}:NAME", key=group, value=choice)
    if (foreign := hook("foreign_names")) and (advice := foreign.choice_advice(group, choice)):
        return ConfigError(advice, key=group, value=choice)
    listed = re.findall(r"^\t(\S+)$", text.partition("Config search path")[0], re.MULTILINE)  # with a user's YAMLs
    files = {path.stem for path in (Path(conf_dir()) / group).glob("*.yaml")}
    names = sorted(files.union(stored(group), listed) - {"parts", "base"})
    more = {
        "model": f", or model=hf model.path={choice} for a folder or a name on the hub",
        "task": f", or task=jsonl task.path={choice} for a file, task=hub task.path={choice} for data on the hub",
    }.get(group, "")
    return ConfigError(f"choose one of {', '.join(names)}{more}{nearest(choice, names)}", key=group, value=choice)


def _composed_choices(overrides: list[str], config_name: str) -> DictConfig:
    """The config that the group choices compose; the default config if one of the choices is wrong."""
    from hydra.types import RunMode

    choices = [text for text in overrides if (found := parse(text)) and "." not in (found.key_or_group or ".")]
    with composer(config_name) as hydra:
        compose = partial(hydra.compose_config, config_name, run_mode=RunMode.RUN, from_shell=False)
        with suppress(HydraException):
            return cast("DictConfig", compose(overrides=choices))
        return cast("DictConfig", compose(overrides=[]))


def _first_paragraph(text: str) -> str:
    """Hydra's message on one line, without its search path."""
    return " ".join(text.partition("Config search path")[0].split())


def _syntax(override: str) -> str:
    """How to write an override, with its value as a text in the quotes of Hydra inside the shell's."""
    if "=" not in override:
        return f"write KEY=VALUE; resume={override} resumes a run, --run {override} evaluates one"
    key, _, value = override.partition("=")
    escaped = value.replace("\n", r"\n").replace("\t", r"\t")  # as users type them
    return SYNTAX.format(shlex.quote(f"{key or 'KEY'}={in_quotes(escaped or 'VALUE', Quote.double)}"))
