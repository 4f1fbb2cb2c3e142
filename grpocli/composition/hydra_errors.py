"""Hydra's and OmegaConf's errors as a ConfigError with the key, the value and the nearest valid name.

Both libraries have few error classes and put the details into their messages, so this module parses these messages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hydra.core.override_parser.types import Quote
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from grpocli.composition.hydra_sources import cleared_hydra, conf_dir
from grpocli.config.build import flat_keys
from grpocli.config.overrides import in_quotes, parse
from grpocli.config.parts import nearest, stored
from grpocli.errors import ConfigError
from grpocli.plugins import hook

NEEDS_QUOTES = "text with commas, braces or other special characters needs quotes inside the shell's"
SYNTAX = "write KEY=VALUE or GROUP=[A,B], with every bracket and quote closed and without spaces beside ="


@contextmanager
def hydra_errors(overrides: list[str], config_name: str) -> Iterator[None]:
    """Raise errors of Hydra and OmegaConf within the block as ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _CommandLine(overrides, config_name).explain(error) from error
    except ValueError as error:
        if not str(error).startswith("Invalid defaults list"):
            raise
        raise ConfigError(str(error)) from error


def choices_in(overrides: list[str]) -> str:
    """The overrides that choose for a group."""
    return " ".join(o for o in overrides if "=" in o and "." not in o.partition("=")[0])


def known_keys(overrides: list[str], config_name: str) -> list[str]:
    """Every key and group of the config that the group choices among `overrides` compose."""
    return _CommandLine(overrides, config_name).known_keys()


FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
"""Keys of Hydra's own that users set."""


@dataclass(frozen=True, slots=True)
class _CommandLine:
    """The overrides of a config that could not be composed."""

    overrides: list[str]
    config_name: str

    def explain(self, error: Exception) -> ConfigError:
        """The ConfigError for an error of Hydra's or OmegaConf's."""
        text = str(error)
        if isinstance(error, OverrideParseException):
            return self._unreadable(error.override)
        if isinstance(error, MissingConfigException):
            return _unknown_choice(text)
        if isinstance(error, ConfigCompositionException):
            if several := re.match(r"Ambiguous value for argument '(.*)'$", text.partition("\n1. ")[0], re.DOTALL):
                return self._several_values(several[1])
            if wrong_type := re.match(r"Error merging override (.*)", text, re.DOTALL):
                return self._wrong_type(wrong_type[1].partition("\n")[0], error.__cause__)
            if missing := re.match(r"You must specify '([^']+)'", text):
                return ConfigError("has no value", key=missing[1], hint=f"set {missing[1]}=...")
            unknown = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text)
            unknown = unknown or re.match(r"Could not (?:override|delete from config\.) '([^'@]+)", text)
            if unknown:
                return self._unknown_key(unknown[1])
            if text.startswith("In 'reward/") and "Merge error" in text:  # a function with the name of another choice
                return two_of_one_name(choices_in(self.overrides))
        return self._key_of_wrong_part(text) or ConfigError(_first_paragraph(text))

    def known_keys(self, hydra: bool = False) -> list[str]:
        """Every key and group of the config, or the keys of Hydra's own."""
        config = self._composed_choices(hydra)
        if config is None:
            return []
        if hydra:
            return flat_keys(OmegaConf.to_container(config.hydra, resolve=False), "hydra.")
        groups = [f"algorithm/{name}" for name in config.get("algorithm", {})] + ["recipe"]
        return flat_keys(OmegaConf.to_container(config, resolve=False)) + groups

    def _unreadable(self, override: str) -> ConfigError:
        """An override that Hydra cannot parse: for its special characters, or because the shell split it at a space."""
        key, equals, value = override.partition("=")
        form = self._as_text(override) if equals else ""
        if not form and key and value and all(value.count(a) == value.count(b) for a, b in ("[]", "{}", "()")):
            form = quoted(key, value)
        if form:
            return _needs_quotes(override, form)
        run = shlex.quote(override)
        other = f"; a value with spaces stands in quotes; resume={run} resumes a run, --run {run} evaluates one"
        return ConfigError("cannot be read", key=override, hint=SYNTAX if equals else SYNTAX + other)

    def _several_values(self, override: str) -> ConfigError:
        """A value with commas that is neither in brackets nor in quotes."""
        key, _, value = override.lstrip("+").partition("=")
        if key == "reward":
            return ConfigError(f"several rewards stand in brackets: '{key}=[{value}]'", key=key, value=value)
        if form := self._as_text(override):
            return _needs_quotes(override, form)
        if key not in self.known_keys(hydra=key.startswith("hydra.")):
            return self._unknown_key(key)
        return ConfigError("give one value; -m tries several in turn", key=key, value=value)

    def _wrong_type(self, override: str, cause: BaseException | None) -> ConfigError:
        key, _, value = override.partition("=")
        if value[:1] in ("[", "{") and (form := self._as_text(override)):
            return _needs_quotes(override, form)
        if inner := [known for known in self.known_keys() if known.startswith(f"{key}.")]:
            keys = ", ".join(inner[:3]) + (" ..." if inner[3:] else "")
            return ConfigError("is a section, not a key", key=key, value=value, hint=f"set its keys: {keys}")
        reason = str(cause).splitlines()[0] if cause else "it does not fit"
        if reason.endswith("is not a ListConfig, list or tuple."):
            form = f"{key}=[{value}]" if re.fullmatch(r"[\w.:/~-]+", value) else quoted_list(key, value)
            return ConfigError("must be a list", key=key, value=value, hint=f"write {form}")
        expected = re.search(r"could not be converted to (\w+)", reason)
        return ConfigError(f"must be of type {expected[1].lower()}" if expected else reason, key=key, value=value)

    def _unknown_key(self, key: str) -> ConfigError:
        problem = f"there is no key {key}"
        if elsewhere := self._key_of_another_choice(key):
            return elsewhere
        given = {o.lstrip("+~").partition("=")[0]: o.partition("=")[2] for o in self.overrides}
        foreign = hook("foreign_names")
        if foreign and (advice := foreign.key_advice(key.rpartition(".")[2], given.get(key, "VALUE"))):
            return ConfigError(problem, hint=advice)
        keys = self.known_keys(hydra=key.startswith("hydra."))
        reward = re.match(r"reward\.(\w+)\.", key)
        if reward and reward[1] in stored("reward") and not any(known.startswith(reward[0]) for known in keys):
            hint = f"add it: reward=[...,{reward[1]}]"
            return ConfigError(f"{problem}, since {reward[1]} is not one of the rewards", hint=hint)
        return ConfigError(f"{problem}{nearest(key, [*keys, *FOLDERS]) or _same_last_word(key, keys)}")

    def _key_of_another_choice(self, key: str) -> ConfigError | None:
        """The error for `algorithm.tokens.quantile` if the chosen `algorithm/tokens` has no such key."""
        section, _, name = key.rpartition(".")
        group = section.replace(".", "/")
        nodes = stored(group).items()
        having = sorted(choice for choice, node in nodes if name in set(node.keys()))  # `in` misses required keys
        config = self._composed_choices(hydra=True)
        if not having:  # model.chat_template_arguments.NAME is part of model.chat_template_arguments
            exists = config is not None and OmegaConf.select(config, section) is not None
            return self._key_of_another_choice(section) if "." in section and not exists else None
        now = config.hydra.runtime.choices.get(group) if config is not None else None
        if group == "task" and now == "mixture":  # the key of each of several tasks has the task's name before it
            inner = [known for known in self.known_keys() if re.fullmatch(rf"task\.\w+\.{re.escape(name)}", known)]
            if inner:
                return ConfigError(f"there is no key {key} for several tasks", hint=f"set {' or '.join(inner[:4])}")
        choices = " or ".join(filter(None, [", ".join(having[:-1]), having[-1]]))
        return ConfigError(f"{key} belongs to {group}={choices}", hint=f"now it is {now}" if now else "")

    def _key_of_wrong_part(self, text: str) -> ConfigError | None:
        """The error for a YAML that sets a key which the chosen part does not have."""
        found = WRONG_PART.search(text)
        if not found:
            return None
        config, _, cls, key = found.groups()
        part = key.rpartition(".")[0].replace(".", "/")
        problem = f"{config} sets {key}, which the choice of {part} ({cls}) does not have"
        return ConfigError(problem, hint=f"keep the choice that it makes, or copy the YAML without {key}")

    def _as_text(self, override: str) -> str:
        """The override quoted for Hydra and the shell; "" unless its key takes a text or a list of texts."""
        key, _, value = override.lstrip("+").partition("=")
        others = _CommandLine([o for o in self.overrides if o != override], self.config_name)
        composed = others._composed_choices(hydra=key.startswith("hydra."))
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(composed, section) if composed and section else None
        found = node._get_node(name) if isinstance(node, DictConfig) and name in node.keys() else None  # noqa: SIM118
        if isinstance(found, ListConfig):
            return quoted_list(key, value)
        return quoted(key, value) if isinstance(found, StringNode) else ""

    def _composed_choices(self, hydra: bool = False) -> DictConfig | None:
        """The config that the group choices compose; the default config if one of the choices is wrong."""
        from hydra import compose, initialize_config_dir

        choices = [text for text in self.overrides if _is_group_choice(text)]
        with cleared_hydra(), initialize_config_dir(conf_dir(), version_base="1.3"):
            for attempt in (choices, []):
                with suppress(HydraException):
                    return cast("DictConfig", compose(self.config_name, attempt, return_hydra_config=hydra))
        return None


def two_of_one_name(chosen: str) -> ConfigError:
    """The error for two rewards with the same keys. chosen: their overrides."""
    hint = "add one as +reward@reward.NAME=..., or change `# @package reward.NAME` in a copied YAML"
    return ConfigError("two rewards have one name", key=chosen, hint=hint)


def _needs_quotes(override: str, form: str) -> ConfigError:
    return ConfigError(NEEDS_QUOTES, key=override, hint=f"write {form}")


def _unknown_choice(text: str) -> ConfigError:
    found = re.search(r"Could not (?:find|load) '(algorithm/\w+(?=/)|[^'/]+)/([^']+)'", text)
    if not found:
        return ConfigError(_first_paragraph(text))
    group, choice = found.groups()
    if choice.endswith(".py"):
        return ConfigError(f"name a function or class of the file: {choice}:NAME", key=group, value=choice)
    if group == "task" and choice.endswith((".jsonl", ".json", ".csv", ".parquet")):
        return ConfigError(f"write task=jsonl task.path={choice}", key=group, value=choice)
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


WRONG_PART = re.compile(r"^In '([^']+)'.*Key '(\w+)' not in '(\w+)'\s*full_key: (\S+)", re.DOTALL)
"""The message for a YAML that sets a key which the chosen part does not have: file, key, class and whole key."""


def _first_paragraph(text: str) -> str:
    """Hydra's message on one line, without its search path."""
    return " ".join(text.split("Config search path")[0].split())


def quoted(key: str, value: str) -> str:
    """An override of a text, with quotes for Hydra inside the shell's: `'KEY="VALUE"'`."""
    return shlex.quote(f"{key}={_in_quotes(value)}")


def quoted_list(key: str, value: str) -> str:
    """An override of a list of texts: `'KEY=["A","B"]'`."""
    texts = [text.strip().strip("'\"") for text in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return shlex.quote(f"{key}=[{','.join(_in_quotes(text) for text in texts if text)}]")


def _in_quotes(text: str) -> str:
    escaped = text.replace("\n", r"\n").replace("\t", r"\t")  # as users type them
    return in_quotes(escaped, Quote.double)


def _same_last_word(key: str, keys: list[str]) -> str:
    """`; did you mean "optim.lr"?` for `lr`; "" if no key ends with the same word."""
    leaf = key.rpartition(".")[2]
    same = [name for name in keys if name.rpartition(".")[2] == leaf]
    return f'; did you mean "{same[0]}"?' if same else ""


def _is_group_choice(text: str) -> bool:
    found = parse(text)
    return found is not None and bool(found.key_or_group) and "." not in found.key_or_group
