"""The reference of every config key, from the dataclasses, their docstrings, conf/ and the table of foreign names."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpocli.config.parts import BASES, CLASSES, nearest
from grpocli.errors import ConfigError
from grpocli_tools.explain.choice_files import HYDRA, ChoiceFiles, spelled
from grpocli_tools.explain.documentation import field_docs, summary
from grpocli_tools.porting.equivalent import Equivalent
from grpocli_tools.porting.foreign_names import TRAINERS

WITHOUT_LABEL = ("run", "algorithm/parts")


@dataclass(frozen=True, slots=True)
class Variant:
    """A key as the choices `choices` have it, such as ("algorithm/objective=clip",); none for a key of no group."""

    choices: tuple[str, ...]
    owner: type[Any]
    field: str
    doc: str
    type: str
    default: str
    allowed: tuple[str, ...]

    @property
    def reader(self) -> str:
        """The class with the field: `Train in grpocli/config/schema.py`."""
        return f"{self.owner.__name__} in {path_of(self.owner)}"


@dataclass(frozen=True, slots=True)
class KeyReference:
    """A config key. set_by: (choice, value) of YAML files that change the default, (recipe, value) included."""

    name: str
    variants: tuple[Variant, ...]
    set_by: tuple[tuple[str, str], ...]
    foreign: Mapping[str, tuple[str, ...]]
    usual: bool = False
    """Whether the default run has the key."""

    @property
    def example(self) -> str:
        """A command that sets the key."""
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
    """A config group, such as `algorithm/keep`, or a section of keys, such as `train` (without choices).

    choices: (choice, summary). default: the choice of the default run. chosen_by: (choice of another group, choice).
    """

    name: str
    doc: str
    choices: tuple[tuple[str, str], ...]
    default: str
    chosen_by: tuple[tuple[str, str], ...]
    foreign: Mapping[str, tuple[str, ...]]
    keys: tuple[KeyReference, ...]

    @property
    def example(self) -> str:
        """A command that makes a choice, or sets the first key."""
        others = [name for name, _ in self.choices if name != self.default]
        if not others:
            return self.keys[0].example if self.keys else "grpocli train"
        return f"grpocli train {self.name}={f'[{others[0]}]' if self.name == 'reward' else others[0]}"


def path_of(cls: type[Any]) -> str:
    """The file of a class, as in the repository."""
    return f"{cls.__module__.replace('.', '/')}.py"


class ReferenceIndex:
    """All keys and groups. folder: conf/, with the YAML files of choices and recipes."""

    def __init__(self, folder: Path) -> None:
        self.files = ChoiceFiles(folder)
        found: dict[str, list[Variant]] = {}
        for label, prefix, cls in _owners():
            for name, variant in _walk(cls, prefix, label):
                found.setdefault(name, []).append(variant)
        usual = {f"{group}={choice.strip('[]')}" for group, choice in self.files.defaults.items()}
        for variants in found.values():  # that of the default run first
            variants.sort(key=lambda one: not usual & set(one.choices))
        merged = {name: _merged(variants) for name, variants in found.items()}
        for name, doc in HYDRA.items():
            merged[name] = (Variant((), ChoiceFiles, name, doc, "text", self.files.hydra[name], ()),)
        self.groups = self.files.groups
        self.foreign = foreign_names([*merged, *self.groups])
        self.keys = {
            name: KeyReference(
                name,
                variants,
                tuple(self.files.values.get(name, ())),
                self.foreign.get(name, {}),
                bool(usual & set(variants[0].choices)),
            )
            for name, variants in merged.items()
        }

    def group(self, name: str) -> GroupReference:
        """A config group or a section of keys. Raises KeyError if there is none."""
        dotted = name.replace("/", ".")
        keys = tuple(key for key in self.keys.values() if key.name.startswith(f"{dotted}."))
        choices = self.groups.get(name, {})
        if not choices and not keys:
            raise KeyError(name)
        return GroupReference(
            name,
            _group_doc(name, dotted),
            tuple(choices.items()),
            self.files.defaults.get(name, ""),
            tuple(self.files.values.get(name, ())),
            self.foreign.get(name, {}),
            keys,
        )

    def has(self, name: str) -> bool:
        """Whether a key, group or section has this name."""
        return name in self.keys or name in self.groups or any(key.startswith(f"{name}.") for key in self.keys)

    def find(self, word: str) -> KeyReference | GroupReference:
        """What a word names: a key, group or section, the only one with this last part, or the group of a choice.

        Raises ConfigError for a word that names nothing or several.
        """
        word = word.strip().lstrip("+").rstrip("./")
        if not word:
            raise ConfigError("the key is empty", hint="grpocli explain train.minibatches")
        for name in (word, word.replace(".", "/"), word.replace("/", ".")):
            if name in self.keys or name in self.groups:
                return self.keys.get(name) or self.group(name)
        if self.has(word):
            return self.group(word)
        ends = [name for name in self.keys if name.endswith(f".{word}")]
        ends += [name for name in self.groups if name.endswith(f"/{word}")]
        ends = ends or [name for name, choices in self.groups.items() if word in choices]
        if len(ends) == 1:
            return self.keys.get(ends[0]) or self.group(ends[0])
        if ends:
            raise ConfigError("several keys have this name", key=word, hint=f"choose {' or '.join(ends[:12])}")
        raise self._unknown(word)

    def _unknown(self, word: str) -> ConfigError:
        names = [*self.keys, *self.groups]
        for trainer, table in TRAINERS.items():
            if word in table:
                hint = f"it is a name of {trainer}: grpocli explain --from-trl {word}"
                return ConfigError("there is no key of this name", key=word, hint=hint)
        close = nearest(word, names) or nearest(word, [name.rpartition(".")[2] for name in self.keys])
        return ConfigError(f"there is no key {word}{close}")


def _owners() -> Iterator[tuple[str, str, type[Any]]]:
    """(choice, prefix of its keys, class) of every class with keys."""
    for name, cls in sorted(CLASSES.items()):
        if not cls.__module__.startswith("grpocli.") or not dataclasses.is_dataclass(cls):
            continue  # a mixture's keys are those of its tasks
        group, slash, _ = name.rpartition("/")
        if slash:
            label = "" if name in WITHOUT_LABEL else name[: len(group)] + "=" + name[len(group) + 1 :]
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
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}" if prefix else f.name
        value = getattr(defaults, f.name) if defaults is not None else f.default
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _walk(type(value), name, label, value)
        elif not _is_group(cls, f):
            shown = _default(f, value)
            yield (
                name,
                Variant(
                    (label,) if label else (),
                    cls,
                    f.name,
                    docs.get(f.name, ""),
                    _type(hints[f.name]),
                    shown,
                    _allowed(cls, f.name, hints[f.name]),
                ),
            )


def _is_group(cls: type[Any], f: dataclasses.Field[Any]) -> bool:
    """Whether a field of a whole run or algorithm holds a config group."""
    return cls in (CLASSES["run"], CLASSES["algorithm/parts"], CLASSES["serve"]) and f.default is dataclasses.MISSING


def _default(f: dataclasses.Field[Any], value: Any) -> str:
    """A default as YAML; "" for a key without one, which must be given."""
    if "interpolate" in f.metadata:
        return "${" + str(f.metadata["interpolate"]) + "}"
    if not isinstance(f.default_factory, dataclasses._MISSING_TYPE) and value is dataclasses.MISSING:
        value = f.default_factory()
    if value is dataclasses.MISSING or (isinstance(value, str) and value == MISSING):
        return ""
    return spelled(value)


NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "any value"}


def _type(hint: Any) -> str:
    """A type in the words of YAML."""
    if hint in NAMES:
        return NAMES[hint]
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
    for owner in cls.__mro__:
        if field in (found := _one_of(owner)):
            return found[field]
    return ()


@functools.cache
def _one_of(cls: type[Any]) -> dict[str, tuple[str, ...]]:
    """{field: allowed values} of the `one_of(self, "FIELD", CHOICES)` calls in a class's source."""
    found = {}
    for call in _calls(cls, "one_of"):
        match call.args:
            case [_, ast.Constant(value=str(field)), choices]:
                try:
                    values = ast.literal_eval(choices)
                except ValueError:
                    values = _global(cls, choices)
                found[field] = tuple(str(value) for value in values)
    return found


def _calls(cls: type[Any], name: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def _global(cls: type[Any], node: ast.expr) -> Sequence[Any]:
    """The value of a name in the module of a class; none for another expression."""
    value = getattr(sys.modules[cls.__module__], node.id, ()) if isinstance(node, ast.Name) else ()
    return tuple(value)


def _merged(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants, with the choices of equal ones in one."""
    equal: dict[tuple[str, ...], list[Variant]] = {}
    for one in variants:
        equal.setdefault((one.doc, one.type, one.default, *one.allowed), []).append(one)
    return tuple(
        dataclasses.replace(
            same[0],
            choices=tuple(choice for one in same for choice in one.choices),
            owner=_common_owner([one.owner for one in same], same[0].field),
        )
        for same in equal.values()
    )


def _common_owner(owners: Sequence[type[Any]], field: str) -> type[Any]:
    """The class that declares a field which several classes share."""
    declaring = [cls for cls in owners[0].__mro__ if field in getattr(cls, "__annotations__", {})]
    shared = [cls for cls in declaring if all(issubclass(owner, cls) for owner in owners)]
    return shared[0] if shared else owners[0]


def _group_doc(name: str, dotted: str) -> str:
    """What a group or section is for: the docstring of its field, else of the class of its keys."""
    owner, field = ("algorithm/parts", name.rpartition("/")[2]) if name.startswith("algorithm/") else ("run", name)
    own = BASES.get(name) or CLASSES.get(dotted)
    return field_docs(CLASSES[owner]).get(field) or (summary(own) if own else "")


def foreign_names(keys: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """{key or group: {trainer: names}} of the names that set it there."""
    known = set(keys)
    found: dict[str, dict[str, list[str]]] = {}
    for trainer, table in TRAINERS.items():
        for name, equivalent in table.items():
            for key in known.intersection(keys_of(equivalent)):
                found.setdefault(key, {}).setdefault(trainer, []).append(name)
    return {key: {trainer: tuple(names) for trainer, names in by.items()} for key, by in found.items()}


def keys_of(equivalent: Equivalent) -> list[str]:
    """The keys that a foreign name sets: those that get its value, else all that it sets."""
    given = [one.partition("=")[0] for one in equivalent.overrides.split() if "{}" in one]
    chosen = [one.partition("=")[0] for text in equivalent.examples() for one in text.split()]
    return list(dict.fromkeys(given or chosen))
