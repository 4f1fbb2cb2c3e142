"""Hydra's complaints as one sentence that names the key and the nearest valid name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from grpocli.config.build import flat_keys
from grpocli.config.foreign_names import choice_advice, key_advice
from grpocli.config.parts import nearest, stored
from grpocli.config.user_code import names_in
from grpocli.errors import ConfigError
from grpocli.launch.hydra_sources import beside_another_hydra, conf_dir


@contextmanager
def friendly(overrides: list[str], config_name: str) -> Iterator[None]:
    """Turn what Hydra raises while composing into a ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides, config_name)) from error


def explain(error: Exception, overrides: list[str], config_name: str) -> str:
    """One sentence for an error of Hydra's or OmegaConf's."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {_unreadable(error.override, overrides, config_name)}"
    if isinstance(error, MissingConfigException):
        return _unknown_choice(text)
    if isinstance(error, ConfigCompositionException):
        if several := re.match(r"Ambiguous value for argument '(.*)'$", text.partition("\n1. ")[0], re.DOTALL):
            return _several(several[1], overrides, config_name)
        wrong_type = re.match(r"Error merging override (.*)", text, re.DOTALL)
        if wrong_type:
            return _wrong_type(wrong_type[1].partition("\n")[0], error.__cause__, overrides, config_name)
        unknown = re.match(r"Could not (?:override|delete from config\.) '([^'@]+)", text)
        group = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text)
        if unknown or group:
            return _unknown_key((group or unknown)[1], overrides, config_name)  # type: ignore[index]
    missing_in_part = re.search(r"^In '([^']+)'.*Key '(\w+)' not in '(\w+)'\s*full_key: (\S+)", text, re.DOTALL)
    if missing_in_part:
        config, _, cls, key = missing_in_part.groups()
        part = key.rpartition(".")[0].replace(".", "/")
        return (
            f"{config} sets {key}, which the choice of {part} ({cls}) does not have; keep the choice that it makes, "
            "or start from another config"
        )
    return " ".join(text.split("Config search path")[0].split())


def _unreadable(override: str, overrides: list[str], config_name: str) -> str:
    """An override that Hydra cannot parse, and how it is typed: most often the shell has divided it at a space."""
    whole = _with_neighbours(override, overrides)
    key, equals, value = whole.partition("=")
    spaced, key = key != key.rstrip(), key.rstrip()
    value = value.strip(" ") if spaced or whole != override else value
    joined = f"{key}={value}"
    if not (key and equals and value) or any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        how = _quotes(whole, overrides, config_name) if equals else ""
        return f"{override}: {how or 'write KEY=VALUE or GROUP=[A,B], with every bracket and quote closed'}"
    form = shlex.quote(joined) if _parses(joined) else _as_text(joined, overrides, config_name) or quoted(key, value)
    if spaced:
        return f"{whole}: write {form}, without a space before ="
    if whole != override:
        part = "a space ends an override" + ("" if "=" in override else "; where this is part of the one before")
        return f"{override}: {part}, write {form}"
    return f"{override}: {WHY_QUOTES} {form}"


def _with_neighbours(override: str, overrides: list[str]) -> str:
    """The override with the words beside it that are none, as they were before the shell took the spaces."""
    if override not in overrides:
        return override
    start = overrides.index(override)
    end = start + 1
    while end < len(overrides) and ("=" not in overrides[end] or overrides[end].startswith("=")):
        end += 1
    begun = "=" in override or (end > start + 1 and overrides[start + 1].startswith("="))
    while start and not begun:
        start -= 1
        begun = "=" in overrides[start]
    return " ".join(overrides[start:end])


def _parses(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def _several(override: str, overrides: list[str], config_name: str) -> str:
    """A value with commas that is neither in brackets nor in quotes."""
    key, _, value = override.lstrip("+").partition("=")
    if key == "reward":
        return f"{override}: several rewards stand in brackets: '{key}=[{value}]'"
    if how := _quotes(override, overrides, config_name):
        return f"{override}: {how}"
    if key not in known_keys(overrides, config_name):
        return _unknown_key(key, overrides, config_name)
    return f"{override}: give one value; -m tries several in turn"


def _unknown_choice(text: str) -> str:
    found = re.search(r"Could not (?:find|load) '(algorithm/\w+(?=/)|[^'/]+)/([^']+)'", text)
    if not found:
        return " ".join(text.split("Config search path")[0].split())
    group, choice = found.groups()
    if choice.endswith(".py"):
        names = names_in(Path(choice).expanduser())
        which = f"; it has {', '.join(names)}" if names else ""
        return f"{group}={choice}: name what to take from the file: {choice}:NAME{which}"
    if group == "task" and choice.endswith((".jsonl", ".json", ".csv", ".parquet")):
        return f"{group}={choice}: write task=jsonl task.path={choice}"
    if advice := choice_advice(group, choice):
        return f"{group}={choice}: {advice}"
    names = [name for name in _choices(group) if name not in ("parts", "base")]
    more = {
        "model": f", or model=hf model.path={choice} for a folder or a name on the hub",
        "task": f", or task=jsonl task.path={choice} for a file, task=hub task.path={choice} for data on the hub",
    }.get(group, "")
    return f"{group}={choice}: choose one of {', '.join(names)}{more}{nearest(choice, names)}"


def _quotes(override: str, overrides: list[str], config_name: str) -> str:
    """That a text, or a list of texts, needs quotes, and which; empty where the key is for neither."""
    form = _as_text(override, overrides, config_name)
    return f"{WHY_QUOTES} {form}" if form else ""


WHY_QUOTES = "text with commas, braces or other special characters needs quotes inside the shell's:"


def _as_text(override: str, overrides: list[str], config_name: str) -> str:
    """How a text, or a list of texts, is typed so that Hydra takes it whole; empty where the key is for neither."""
    key, _, value = override.lstrip("+").partition("=")
    composed = _composed_choices([o for o in overrides if o != override], config_name)
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(composed, section) if composed and section else None
    found = node._get_node(name) if isinstance(node, DictConfig) and name in node.keys() else None  # noqa: SIM118
    if isinstance(found, ListConfig):
        return quoted_list(key, value)
    return quoted(key, value) if isinstance(found, StringNode) else ""


def quoted(key: str, value: str) -> str:
    """An override of a text, with quotes for Hydra inside the shell's: `'KEY="VALUE"'`."""
    return shlex.quote(f"{key}={_in_quotes(value)}")


def quoted_list(key: str, value: str) -> str:
    """An override of a list of texts: `'KEY=["A","B"]'`."""
    texts = [text.strip().strip("'\"") for text in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return shlex.quote(f"{key}=[{','.join(_in_quotes(text) for text in texts if text)}]")


def _in_quotes(text: str) -> str:
    escaped = text.replace("\n", r"\n").replace("\t", r"\t")  # as users type them
    quotes: str = QuotedString(escaped, Quote.double).with_quotes()
    return quotes


def _choices(group: str) -> list[str]:
    files = {path.stem for path in (Path(conf_dir()) / group).glob("*.yaml")}
    return sorted(files | set(stored(group)))


def _wrong_type(override: str, cause: BaseException | None, overrides: list[str], config_name: str) -> str:
    key, _, value = override.partition("=")
    reason = str(cause).splitlines()[0] if cause else "it does not fit"
    if value[:1] in ("[", "{") and (how := _quotes(override, overrides, config_name)):
        return f"{key}={value}: {how}"
    expected = re.search(r"could not be converted to (\w+)", reason)
    need = f"must be of type {expected[1].lower()}" if expected else reason
    return f"{key}={value}: {need}"


def _unknown_key(key: str, overrides: list[str], config_name: str) -> str:
    elsewhere = _key_of_another_choice(key, overrides, config_name)
    if elsewhere:
        return elsewhere
    given = {o.lstrip("+~").partition("=")[0]: o.partition("=")[2] for o in overrides}
    if advice := key_advice(key.rpartition(".")[2], given.get(key, "VALUE")):
        return f"there is no key {key}; {advice}"
    if (reward := re.match(r"reward\.(\w+)\.", key)) and reward[1] in stored("reward"):
        return f"there is no key {key}, since {reward[1]} is not one of the rewards; add it: reward=[...,{reward[1]}]"
    keys = known_keys(overrides, config_name, hydra=key.startswith("hydra."))
    return f"there is no key {key}{nearest(key, keys) or nearest_leaf(key, keys)}"


def _key_of_another_choice(key: str, overrides: list[str], config_name: str) -> str | None:
    """`algorithm.tokens.quantile` where `algorithm/tokens` is another choice than the one that has it."""
    section, _, name = key.rpartition(".")
    group = section.replace(".", "/")
    having = sorted(choice for choice, node in stored(group).items() if name in node)
    if not having:
        return None
    now = _chosen(group, overrides, config_name)
    choices = " or ".join(filter(None, [", ".join(having[:-1]), having[-1]]))
    return f"{key} belongs to {group}={choices}" + (f"; now it is {now}" if now else "")


def _chosen(group: str, overrides: list[str], config_name: str) -> str | None:
    """The choice of a group that the group choices among `overrides` lead to."""
    config = _composed_choices(overrides, config_name, hydra=True)
    choice: str | None = config.hydra.runtime.choices.get(group) if config is not None else None
    return choice


def nearest_leaf(key: str, keys: list[str]) -> str:
    """A key elsewhere with the same last word: `lr` is `optim.lr`."""
    leaf = key.rpartition(".")[2]
    same = [name for name in keys if name.rpartition(".")[2] == leaf]
    return f'; did you mean "{same[0]}"?' if same else ""


def known_keys(overrides: list[str], config_name: str, hydra: bool = False) -> list[str]:
    """Every key and group of the config that the group choices among `overrides` compose; `hydra`: Hydra's own."""
    config = _composed_choices(overrides, config_name, hydra)
    if config is None:
        return []
    if hydra:
        return flat_keys(OmegaConf.to_container(config.hydra, resolve=False), "hydra.")
    return flat_keys(OmegaConf.to_container(config, resolve=False)) + _groups(config)


def _composed_choices(overrides: list[str], config_name: str, hydra: bool = False) -> DictConfig | None:
    """What the group choices among `overrides` compose, or the defaults where one of them is wrong."""
    from hydra import compose, initialize_config_dir

    groups = [text for text in overrides if _is_group_choice(text)]
    with beside_another_hydra(), initialize_config_dir(conf_dir(), version_base="1.3"):
        for attempt in (groups, []):
            with suppress(HydraException):  # the defaults are still worth comparing with
                return cast("DictConfig", compose(config_name, overrides=attempt, return_hydra_config=hydra))
    return None


def _groups(config: DictConfig) -> list[str]:
    return [f"algorithm/{name}" for name in config.get("algorithm", {})] + ["recipe"]


def _is_group_choice(text: str) -> bool:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return bool(override.key_or_group) and "." not in override.key_or_group
