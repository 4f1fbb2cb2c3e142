"""Rewrites the overrides that users type into overrides that Hydra accepts.

Rewriting changes no valid override and is idempotent. Escapes are the exception: only `from_command_line` decodes
them, once.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, QuotedString

from grpocli.config.overrides import parse, texts_of, to_text, unescape
from grpocli.config.parts import ESCAPED, USER_CODE, is_marked
from grpocli.config.schema import Run
from grpocli.config.user_code import absolute
from grpocli.config.user_parts import GROUP, is_spec, name_of
from grpocli.errors import ConfigError
from grpocli.plugins import hook


def rewrite(overrides: Sequence[str], config_name: str = "train") -> list[str]:
    """The overrides as Hydra accepts them.

    Raises ConfigError for a choice or folder without a name, a key of another trainer, and a list that names a task
    twice.
    """
    _refuse_empty(overrides)
    _refuse_foreign(overrides, config_name)
    overrides = [INFINITE.sub(r"\1inf", override) for override in expand_task_lists(overrides)]
    overrides = [_absolute(LORA.sub(r"\1.rank=\2", override)) for override in overrides]
    # the resolver of ${hydra:...} knows nothing before a job begins, the node does
    overrides = [one.replace("${hydra:", "${hydra.") if one.startswith("hydra.") else one for one in overrides]
    return _hf_for_path(overrides, config_name)


PATH = re.compile(r"(?!hydra\.).*[._](path|file|folder|chat_template|response_template|kl\.model(\.\w+)?)")
LORA = re.compile(r"^(\+*model\.lora)=([\d, ]+)$")
"""`model.lora=16`, short for `model.lora.rank=16`."""

INFINITE = re.compile(r"^(\+*algorithm\.[\w.]+=-?)\.inf$")
"""`.inf` as in a YAML; Hydra's overrides have `inf`."""


def from_command_line(overrides: Sequence[str], config_name: str = "train") -> list[str]:
    """`rewrite` for a command line, in which escapes stand for line breaks and tabs."""
    return rewrite([_unescaped(_quote(override)) for override in overrides], config_name)


ODD = re.compile(r"[^\w\s/\\+.$%*@?|:,\[\]{}()'\"-]", re.ASCII)
"""Characters that Hydra reads in quotes alone."""
TEXT = re.compile(r"[^\s,\[\]{}()'\"]([^,\[\]{}()'\"]*[^\s,\[\]{}()'\"])?")
"""A text without quotes, in a list or alone."""


def _quote(override: str) -> str:
    """The override with quotes around texts such as /home/josé; unchanged if Hydra reads it without them.

    A value whose folder exists is one path, whatever Hydra would read in its commas and brackets; a comma after the
    folder (`./a,tiny`) is a sweep's, unless the value exists.
    """
    key, _, value = override.partition("=")
    if "/" in value and texts_of(override) == [value]:
        folder, name = os.path.split(value)  # pathlib fails at long texts
        if os.path.exists(os.path.expanduser(value if "," in name and parse(override) else folder)):  # noqa: PTH110, PTH111
            return f"{key}={to_text(value)}"
    if not ODD.search(value) or parse(override):
        return override
    new = f"{key}={TEXT.sub(lambda text: to_text(text[0]) if ODD.search(text[0]) else text[0], value)}"
    return new if parse(new) else override


def _unescaped(override: str) -> str:
    return _changed(override, unescape) if "\\" in override and is_marked(_key(override), ESCAPED) else override


def _key(override: str) -> str:
    """The key or group, without `+` and `@PACKAGE`."""
    return override.partition("=")[0].lstrip("+").partition("@")[0]


def _changed(override: str, change: Callable[[str], str]) -> str:
    """The override with `change` applied to each text of its value; the same string if nothing changes."""
    found = parse(override)
    if found is None:
        return override  # Hydra reports the error
    before = found._value  # with its quotes, which value() drops
    after = _each(before, change)
    if after == before:
        return override
    several = isinstance(after, ChoiceSweep)
    value = ",".join(map(to_text, after.list)) if several else to_text(after)
    return f"{found.get_key_element()}={value}"


def _each(value: Any, change: Callable[[str], str]) -> Any:
    """The value with `change` applied to each text; a shuffled or tagged sweep stays as it is."""
    if isinstance(value, ChoiceSweep):
        return value if value.shuffle or value.tags else replace(value, list=[_each(one, change) for one in value.list])
    if isinstance(value, list):
        return [_each(one, change) for one in value]
    if isinstance(value, QuotedString):
        return replace(value, text=change(value.text))
    return change(value) if isinstance(value, str) else value


def _absolute(override: str) -> str:
    """The override with absolute paths of user code, models and data, because a resume may start in another folder."""
    key = _key(override)
    if PATH.fullmatch(key):
        return _changed(override, _absolute_path)
    if key == "model":
        return _changed(override, _absolute_model)
    return _changed(override, _absolute_code) if GROUP.fullmatch(key) or is_marked(key, USER_CODE) else override


def _absolute_code(text: str) -> str:
    return absolute(text) if is_spec(text) else text


def _absolute_model(text: str) -> str:
    if is_spec(text):
        return absolute(text)
    folder = Path(text).expanduser()
    return str(folder.resolve()) if text.startswith((".", "~")) or ("/" in text and folder.is_dir()) else text


def _absolute_path(text: str) -> str:
    path = Path(text).expanduser()
    return str(path.resolve()) if path.exists() else text


def in_files(override: str, files: Mapping[str, str]) -> str:
    """The override with user code in other files, {old: new}."""

    def moved(text: str) -> str:
        place, _, name = text.rpartition(":")
        return f"{files[place]}:{name}" if place in files else text

    return _changed(override, moved) if any(place in override for place in files) else override


def _hf_for_path(overrides: list[str], config_name: str) -> list[str]:
    """Add `model=hf` to `model.path=...`, unless the chosen model has this key, for example in a recipe."""
    from grpocli.composition.hydra_errors import known_keys

    keys = set(map(_key, overrides))
    if "model.path" not in keys or keys & {"model", "resume"}:
        return overrides
    return overrides if "model.path" in known_keys(overrides, config_name) else ["model=hf", *overrides]


TASK_LIST = re.compile(r"task=\[(.*)\]\s*")


def expand_task_lists(overrides: Sequence[str]) -> list[str]:
    """Replace `task=[A,B]` by `task=mixture` and an override for each task, so that they share no keys.

    Raises ConfigError for an empty list or a duplicate task.
    """
    return [expanded for override in overrides for expanded in _expand_task_list(override)]


def _expand_task_list(override: str) -> list[str]:
    found = TASK_LIST.fullmatch(override)
    if not found:
        return [override]
    choices = [choice for choice in texts_of(override) if choice]
    names = [name_of(choice) for choice in choices]
    if not names:
        raise ConfigError("choose at least one task", key="task", value="[]")
    if twice := [choice for i, choice in enumerate(choices) if names[i] in names[:i]]:
        hint = f"leave one out and give it a name: +task@task.NAME={twice[0]}"
        raise ConfigError(f"names {name_of(twice[0])} twice", key="task", value=f"[{found[1]}]", hint=hint)
    return [
        "task=mixture",
        *(f"+task@task.{name}={to_text(choice)}" for name, choice in zip(names, choices, strict=True)),
    ]


def option_advice(name: str, value: str, options: Iterable[str] = ()) -> str:
    """Advice for an unknown option `--NAME VALUE`: one of the command's `options`, or an override."""
    key = name.replace("-", "_")
    if (foreign := hook("foreign_names")) and (advice := foreign.advice_of_like(key, value)):
        return str(advice)
    if "." in key or key == "recipe" or key in {field.name for field in dataclasses.fields(Run)}:
        return f"write {key}=[{value}]" if key == "reward" else f"write {key}={value}"
    if close := difflib.get_close_matches(f"--{name}", options, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    return "settings are KEY=VALUE without dashes, such as train.steps=20"


def _refuse_empty(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an empty choice or folder, for example `resume=$UNSET`, where Hydra would use a default."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and not value.strip(" '\"") and NEVER_EMPTY.fullmatch(_key(override)):
            raise ConfigError(
                "has no value", key=f"{key}=", hint=f"give one, or leave {key}= out (is a shell variable unset?)"
            )


NEVER_EMPTY = re.compile(rf"{GROUP.pattern}|algorithm|recipe|resume|hydra/\w+|hydra\.(run|sweep)\.dir")
"""Keys whose value names a choice or a folder."""


def _refuse_foreign(overrides: Sequence[str], config_name: str) -> None:
    """Raise one ConfigError for all keys of other trainers; Hydra would stop at the first."""
    if (names := hook("foreign_names")) is None:
        return
    valid = ("lora_rank", "dtype") if config_name == "vllm_serve" else ()  # keys of this command, too
    given = [override.lstrip("+").partition("=") for override in overrides]
    foreign = {key: advice for key, _, value in given if key not in valid and (advice := names.key_advice(key, value))}
    if len(foreign) > 1:
        raise ConfigError("there are no keys " + ", ".join(f"{key} ({advice})" for key, advice in foreign.items()))
    for key, advice in foreign.items():
        raise ConfigError(f"there is no key {key}", hint=advice)
