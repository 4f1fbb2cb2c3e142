"""The reference of every config key, from the dataclasses, their docstrings, conf/ and the tables of foreign names."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from grpocli.config import yaml_text
from grpocli.config.parts import BASES, CLASSES, nearest, nearest_key
from grpocli.config.yaml_text import flat
from grpocli.errors import ConfigError
from grpocli_tools.explain.formulas import field_docs, summary
from grpocli_tools.porting.foreign_names import TRAINERS

HYDRA = {
    "hydra.run.dir": "Folder of the run.",
    "hydra.sweep.dir": "Folder of a sweep, with `-m`.",
    "hydra.sweep.subdir": "Folder of each run in the folder of a sweep.",
}
"""The keys of Hydra that belong to a run; conf/train.yaml has their defaults."""
GENERATED = "# Written by `make conf`"
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "any value"}
Foreign = Mapping[str, Sequence[str]]
"""{trainer: its names of a key}."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A key as some choices have it."""

    choices: tuple[str, ...]
    """The choices, such as `algorithm/objective=clip`; none for a key of no group."""
    owner: type[Any]
    field: str
    doc: str
    type: str
    default: str
    allowed: tuple[str, ...]

    @property
    def reader(self) -> str:
        """The class that declares the field: `Train in grpocli/config/schema.py`."""
        declares = [cls for cls in self.owner.__mro__ if self.field in getattr(cls, "__annotations__", {})]
        cls = declares[-1] if declares else self.owner
        return f"{cls.__name__} in {cls.__module__.replace('.', '/')}.py"


@dataclass(frozen=True, slots=True)
class KeyReference:
    """A config key."""

    name: str
    variants: tuple[Variant, ...]
    set_by: tuple[tuple[str, str], ...]
    """(choice, value) of YAML files that change the default, recipes included."""
    foreign: Foreign
    usual: bool = False
    """Whether the default run has the key."""

    @property
    def example(self) -> str:
        first = self.variants[0]
        default = f"'{first.default}'" if "$" in first.default else first.default.replace("null", "") or "VALUE"
        override = f"{self.name}={next((one for one in first.allowed if one != first.default), default)}"
        label = first.choices[0] if first.choices and not self.usual else ""
        if label.startswith("grpocli "):
            return f"{label} {override}"
        group, _, choice = label.partition("=")
        chosen = {"": "", "reward": f"reward=[{choice}] ", "hydra/launcher": f"-m {label} "}.get(group, f"{label} ")
        return f"grpocli train {chosen}{override}"


@dataclass(frozen=True, slots=True)
class GroupReference:
    """A config group, such as `algorithm/keep`, or a section of keys, such as `train` (without choices)."""

    name: str
    doc: str
    choices: tuple[tuple[str, str], ...]
    """(choice, summary)."""
    default: str
    """The choice of the default run."""
    chosen_by: tuple[tuple[str, str], ...]
    """(choice of another group, choice)."""
    foreign: Foreign
    keys: tuple[KeyReference, ...]

    @property
    def example(self) -> str:
        others = [name for name, _ in self.choices if name != self.default]
        if not others:
            return self.keys[0].example if self.keys else "grpocli train"
        return f"grpocli train {self.name}={f'[{others[0]}]' if self.name == 'reward' else others[0]}"


class ReferenceIndex:
    """All keys and groups. folder: conf/, with the YAML files of choices and recipes."""

    def __init__(self, folder: Path) -> None:
        self.files = ChoiceFiles(folder)
        self.groups = self.files.groups
        found: dict[str, list[Variant]] = {}
        for label, prefix, cls in _owners():
            for name, variant in _walk(cls, prefix, label):
                found.setdefault(name, []).append(variant)
        for name, doc in HYDRA.items():
            found[name] = [Variant((), ChoiceFiles, name, doc, "text", self.files.hydra[name], ())]
        usual = {f"{group}={choice.strip('[]')}" for group, choice in self.files.defaults.items()}
        self.foreign = foreign_names([*found, *self.groups])
        self.keys: dict[str, KeyReference] = {}
        for name, variants in found.items():
            variants.sort(key=lambda one: not usual & set(one.choices))  # that of the default run first
            merged, set_by = _merged(variants), tuple(self.files.values.get(name, ()))
            of_default = bool(usual & set(merged[0].choices))
            self.keys[name] = KeyReference(name, merged, set_by, self.foreign.get(name, {}), of_default)

    def group(self, name: str) -> GroupReference:
        dotted = name.replace("/", ".")
        kind = ("algorithm/parts", name.rpartition("/")[2]) if name.startswith("algorithm/") else ("run", name)
        own = BASES.get(name) or CLASSES.get(dotted)
        return GroupReference(
            name,
            field_docs(CLASSES[kind[0]]).get(kind[1]) or (summary(own) if own else ""),
            tuple(self.groups.get(name, {}).items()),
            self.files.defaults.get(name, ""),
            tuple(self.files.values.get(name, ())),
            self.foreign.get(name, {}),
            tuple(key for key in self.keys.values() if key.name.startswith(f"{dotted}.")),
        )

    def has(self, name: str) -> bool:
        return name in self.keys or name in self.groups or any(key.startswith(f"{name}.") for key in self.keys)

    def default_of(self, name: str) -> str | None:
        """The default of a key or group; None for an unknown one."""
        return self.keys[name].variants[0].default if name in self.keys else self.files.defaults.get(name)

    def find(self, word: str) -> KeyReference | GroupReference:
        """What a word names: a key, group or section, the only one with this last part, or the group of a choice.

        Raises ConfigError for a word that names nothing or several.
        """
        word = word.strip().lstrip("+").rstrip("./")
        for name in (word, word.replace(".", "/"), word.replace("/", ".")):
            if name in self.keys or name in self.groups:
                return self.keys.get(name) or self.group(name)
        if word and self.has(word):
            return self.group(word)
        ends = [name for name in self.keys if name.endswith(f".{word}")]
        ends += [name for name in self.groups if name.endswith(f"/{word}")]
        ends = ends or [name for name, choices in self.groups.items() if word in choices]
        if len(ends) == 1:
            return self.keys.get(ends[0]) or self.group(ends[0])
        if ends:
            raise ConfigError("several keys have this name", key=word, hint=f"choose {' or '.join(ends[:12])}")
        for trainer, names in TRAINERS.items():
            if word in names:
                hint = f"it is a name of {trainer}: grpocli explain --from-trl {word}"
                raise ConfigError("there is no key of this name", key=word, hint=hint)
        parts = [name.rpartition(".")[2] for name in self.keys]
        close = nearest_key(word, [*self.keys, *self.groups]) or ("" if "." in word else nearest(word, parts))
        raise ConfigError(f"there is no key {word or '(nothing)'}{close}")


class ChoiceFiles:
    """What the YAML files of conf/ choose and set, read as data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, list[tuple[str, str]]] = {}
        """{key or group: [(choice, value)]}."""
        train = self._read(folder / "train.yaml")
        self.defaults = dict(_chosen(train))
        """{group: choice of the default run}."""
        algorithm = self._read(folder / "algorithm" / f"{self.defaults['algorithm']}.yaml")
        self.defaults |= {f"algorithm/{group}": choice for group, choice in _chosen(algorithm)}
        self.hydra = {key: str(value) for key, value in flat(train).items() if key in HYDRA}
        self.groups: dict[str, dict[str, str]] = {}
        """{group: {choice: summary}}."""
        for file in sorted(folder.rglob("*.yaml"), key=_recipes_last):
            group = str(file.parent.relative_to(folder))
            if group != "." and not group.startswith("hydra"):
                self._choice(group, file)
        for name, cls in sorted(CLASSES.items()):
            group, slash, choice = name.rpartition("/")
            if slash and name != "algorithm/parts":
                self.groups.setdefault(group, {}).setdefault(choice, summary(cls))
        self.groups.setdefault("hydra/launcher", {"basic": "One run after the other."})["slurm"] = "SLURM jobs."

    def _choice(self, group: str, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        label = f"{group.removesuffix('_defaults')}={file.stem}"
        if not group.endswith("_defaults") and file.stem != "parts":
            self.groups.setdefault(group, {})[file.stem] = _comment(text)
        if GENERATED in text:
            return
        self._chooses(label, self._read(file), group)
        for key, value in self._set_by(group, file.stem):
            self._add(key, label, value)

    def _chooses(self, label: str, config: Mapping[str, Any], group: str) -> None:
        """Record the choices of a defaults list, and what the chosen files set."""
        for name, choice in _chosen(config):
            if "@" in name:
                name = name.partition("@")[0].lstrip("/")
                target, listed = name, name
            else:
                listed = name.removeprefix("override ").strip().lstrip("/")
                target = f"{group}/{listed}" if group == "algorithm" and "override" not in name else listed
            if target not in ("reward",) or group == "recipe":
                self._add(target, label, choice)
            for key, value in self._set_by(target, choice):
                self._add(key, label, value)

    def _set_by(self, group: str, choice: str) -> Iterator[tuple[str, str]]:
        """(key, value) of what a file sets, unless it only repeats a class's defaults."""
        file = self.folder / group / f"{choice}.yaml"
        if not file.is_file() or GENERATED in (text := file.read_text(encoding="utf-8")):
            return
        package = re.match(r"# @package (\S+)", text)
        prefix = package[1] if package else group.replace("/", ".")
        for key, value in _flat(self._read(file), "" if prefix == "_global_" else prefix):
            yield key, spelled(value)

    def _add(self, key: str, label: str, value: str) -> None:
        entries = self.values.setdefault(key, [])
        if (label, value) not in entries:
            entries.append((label, value))

    def _read(self, file: Path) -> dict[str, Any]:
        return dict(yaml_text.load(file.read_text(encoding="utf-8")) or {})


def _recipes_last(path: Path) -> tuple[bool, str]:
    return "recipe" in path.parts, str(path)


def _chosen(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(group as written, choice) of a defaults list."""
    for entry in config.get("defaults", ()):
        for name, choice in entry.items() if isinstance(entry, dict) else ():
            name = str(name).removeprefix("optional ")
            if choice is not None and "$" not in str(choice):
                yield name, f"[{', '.join(map(str, choice))}]" if isinstance(choice, list) else str(choice)


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    yield from flat({name: value for name, value in config.items() if name != "defaults"}, prefix).items()


def _comment(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    comment = takewhile(lambda line: line.startswith("# "), lines)
    return re.split(r"(?<=[.:;]) ", " ".join(line.removeprefix("# ") for line in comment))[0].rstrip(":;")


def spelled(value: Any) -> str:
    """A value as users type it: YAML on one line, with numbers as `1e-06`."""
    if isinstance(value, float):
        return repr(value)
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump([plain], default_flow_style=True, allow_unicode=True, width=10_000)
    return text.strip()[1:-1]


def _owners() -> Iterator[tuple[str, str, type[Any]]]:
    """(choice, prefix of its keys, class) of every class with keys."""
    for name, cls in sorted(CLASSES.items()):
        if not cls.__module__.startswith("grpocli.") or not dataclasses.is_dataclass(cls):
            continue  # a mixture's keys are those of its tasks
        group, slash, choice = name.rpartition("/")
        if slash:
            label = "" if name == "algorithm/parts" else f"{group}={choice}"
            yield label, getattr(cls, "config_key", group.replace("/", ".")), cls
        elif name == "run":
            yield "", "", cls
        elif name == "serve":
            yield "grpocli vllm-serve", "", cls
        elif name == "hydra.launcher":
            yield "hydra/launcher=slurm", name, cls


def _walk(cls: type[Any], prefix: str, label: str, defaults: Any = None) -> Iterator[tuple[str, Variant]]:
    """(key, variant) of a class's fields and those of its sections. defaults: an object with other defaults."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    holds_groups = cls in (CLASSES["run"], CLASSES["algorithm/parts"], CLASSES["serve"])
    for f in dataclasses.fields(cls):
        name, hint = f"{prefix}.{f.name}".lstrip("."), hints[f.name]
        value = getattr(defaults, f.name) if defaults is not None else f.default
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _walk(type(value), name, label, value)
        elif not holds_groups or f.default is not dataclasses.MISSING:
            choices, allowed = (label,) if label else (), _allowed(cls, f.name, hint)
            yield name, Variant(choices, cls, f.name, docs.get(f.name, ""), _type(hint), _default(f, value), allowed)


def _default(f: dataclasses.Field[Any], value: Any) -> str:
    """A default as YAML; "" for a key without one, which must be given."""
    if "interpolate" in f.metadata:
        return "${" + str(f.metadata["interpolate"]) + "}"
    if f.default_factory is not dataclasses.MISSING and value is dataclasses.MISSING:
        value = f.default_factory()
    return "" if value is dataclasses.MISSING or value == MISSING else spelled(value)


def _type(hint: Any) -> str:
    if hint in TYPES:
        return TYPES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one) for one in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}s" if arguments else "list"
    if origin is tuple:
        return f"{len(arguments)} {_type(arguments[0])}s"
    return "mapping" if origin is dict or hint is dict else getattr(hint, "__name__", str(hint))


def _allowed(cls: type[Any], field: str, hint: Any) -> tuple[str, ...]:
    """The values that `one_of` allows for a field in the class or its bases; true and false for a bool."""
    if hint is bool:
        return ("true", "false")
    found = (_one_of(owner)[field] for owner in cls.__mro__[:-1] if field in _one_of(owner))
    return next(found, ())


@functools.cache
def _one_of(cls: type[Any]) -> dict[str, tuple[str, ...]]:
    """{field: allowed values} of the `one_of(self, "FIELD", CHOICES)` calls in a class's source."""
    found = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        match node:
            case ast.Call(func=ast.Name(id="one_of"), args=[_, ast.Constant(value=str(field)), choices]) if not any(
                isinstance(one, ast.Name) and one.id == "run"
                for one in ast.walk(choices)  # those of check_run
            ):
                with suppress(NameError):  # such as the columns of a run's data
                    values = eval(ast.unparse(choices), vars(sys.modules[cls.__module__]))  # noqa: S307 - our own source
                    found[field] = tuple(map(str, values))
    return found


def _merged(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants, with the choices of equal ones in one."""
    equal: dict[tuple[str, ...], list[Variant]] = {}
    for one in variants:
        equal.setdefault((one.doc, one.type, one.default, *one.allowed), []).append(one)
    return tuple(
        dataclasses.replace(same[0], choices=tuple(choice for one in same for choice in one.choices))
        for same in equal.values()
    )


def foreign_names(keys: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """{key or group: {trainer: names}} of the names that set it there."""
    known = set(keys)
    found: dict[str, dict[str, list[str]]] = {}
    for trainer, names in TRAINERS.items():
        for name, equivalent in names.items():
            for key in known.intersection(equivalent.keys):
                found.setdefault(key, {}).setdefault(trainer, []).append(name)
    return found
