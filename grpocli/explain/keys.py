"""The reference of every config key, from the dataclasses, their docstrings, conf/ and the table of foreign names."""

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
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from grpocli.config import yaml_text
from grpocli.config.build import flat_keys
from grpocli.config.field_docs import field_docs, summary
from grpocli.config.foreign_names import TRAINERS, Equivalent
from grpocli.config.parts import BASES, CLASSES, nearest
from grpocli.errors import ConfigError

HYDRA = {
    "hydra.run.dir": "Folder of the run.",
    "hydra.sweep.dir": "Folder of a sweep, with `-m`.",
    "hydra.sweep.subdir": "Folder of each run in the folder of a sweep.",
}
"""The keys of Hydra that belong to a run; conf/train.yaml has their defaults."""
WITHOUT_LABEL = ("run", "algorithm/parts")
UNITS = (
    *("seconds", "tokens", "prompts", "completions", "steps", "updates", "passes", "GiB", "MB", "megabytes", "nats"),
    *("GPUs", "processes", "machines", "servers", "rows", "turns", "restarts", "problems", "checkpoints", "samples"),
)
"""The nouns of numbers in the docstrings of fields; the first one in a docstring's first sentence is the unit."""


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
    def unit(self) -> str:
        """The unit of a number, as its docstring states it; "" without one."""
        if "number" not in self.type:
            return ""
        words = re.findall(r"[A-Za-z]+", self.doc.split(". ")[0])
        words = words if "whole" in self.type else words[:2]  # other numbers are mostly shares
        return next((unit for word in words for unit in UNITS if word.lower() in (unit.lower(), f"{unit}s")), "")

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
    related: tuple[str, ...]
    usual: bool = False
    """Whether the default run has the key."""

    @property
    def example(self) -> str:
        """A command that sets the key."""
        first = self.variants[0]
        label = first.choices[0] if first.choices and not self.usual else ""
        if label.startswith("grpocli "):
            return f"{label} {_override(self.name, first)}"
        group, _, choice = label.partition("=")
        chosen = {"": "", "reward": f"reward=[{choice}] ", "hydra/launcher": f"-m {label} "}.get(group, f"{label} ")
        return f"grpocli train {chosen}{_override(self.name, first)}"


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
        self.yamls = Yamls(folder)
        found: dict[str, list[Variant]] = {}
        for label, prefix, cls in _owners():
            for name, variant in _walk(cls, prefix, label):
                found.setdefault(name, []).append(variant)
        usual = {f"{group}={choice.strip('[]')}" for group, choice in self.yamls.defaults.items()}
        merged = {name: _merged(_usual_first(variants, usual)) for name, variants in found.items()}
        self.usual = usual
        merged |= {name: (self._hydra(name, doc),) for name, doc in HYDRA.items()}
        self.groups = self.yamls.groups
        foreign = foreign_names([*merged, *self.groups])
        mentions = {name: _mentioned(name, variants, merged) for name, variants in merged.items()}
        self.keys = {
            name: KeyReference(
                name,
                variants,
                tuple(self.yamls.values.get(name, ())),
                foreign.get(name, {}),
                tuple(dict.fromkeys([*mentions[name], *(other for other in mentions if name in mentions[other])]))[:6],
                bool(usual & set(variants[0].choices)),
            )
            for name, variants in merged.items()
        }
        self.foreign = foreign

    def _hydra(self, name: str, doc: str) -> Variant:
        return Variant((), Yamls, name, doc, "text", self.yamls.hydra[name], ())

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
            self.yamls.defaults.get(name, ""),
            tuple(self.yamls.values.get(name, ())),
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


def spelled(value: Any) -> str:
    """A value as users type it: YAML on one line, with numbers as `1e-06`."""
    if isinstance(value, float):
        return repr(value)
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump([plain], default_flow_style=True, allow_unicode=True, width=10_000)
    return text.strip()[1:-1]


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


def _usual_first(variants: Sequence[Variant], usual: set[str]) -> list[Variant]:
    """The variants, that of the default run first."""
    return sorted(variants, key=lambda one: not usual & set(one.choices))


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


def _mentioned(name: str, variants: Sequence[Variant], keys: Mapping[str, Any]) -> list[str]:
    """The other keys that the docstrings of a key mention, also by their last part if it is of the same section."""
    section = name.rpartition(".")[0]
    text = " ".join(variant.doc + " " + variant.default for variant in variants)
    words = dict.fromkeys(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", text))
    found = [
        word if word in keys and "." in word else f"{section}.{word}" for word in words if "." in word or "_" in word
    ]
    return [one for one in dict.fromkeys(found) if one in keys and one != name]


def _group_doc(name: str, dotted: str) -> str:
    """What a group or section is for: the docstring of its field, else of the class of its keys."""
    owner, field = ("algorithm/parts", name.rpartition("/")[2]) if name.startswith("algorithm/") else ("run", name)
    own = BASES.get(name) or CLASSES.get(dotted)
    return field_docs(CLASSES[owner]).get(field) or (summary(own) if own else "")


class Yamls:
    """What the YAML files of conf/ choose and set, read as data.

    values: {key or group: [(choice, value)]}. defaults: {group: choice of the default run}.
    groups: {group: {choice: summary}}.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, list[tuple[str, str]]] = {}
        self.defaults: dict[str, str] = {}
        self.groups: dict[str, dict[str, str]] = {}
        self.hydra: dict[str, str] = {}
        self._train()
        for file in sorted(folder.rglob("*.yaml"), key=_recipes_last):
            group = str(file.parent.relative_to(folder))
            if group != "." and not group.startswith("hydra"):
                self._choice(group, file)
        for name, cls in sorted(CLASSES.items()):
            group, slash, choice = name.rpartition("/")
            if slash and name != "algorithm/parts":
                self.groups.setdefault(group, {}).setdefault(choice, summary(cls))
        self.groups.setdefault("hydra/launcher", {"basic": "One run after the other."})["slurm"] = "SLURM jobs."

    def _train(self) -> None:
        config = self._read(self.folder / "train.yaml")
        for group, choice in _chosen(config):
            self.defaults[group] = choice
        for group, choice in _chosen(self._read(self.folder / "algorithm" / f"{self.defaults['algorithm']}.yaml")):
            self.defaults[f"algorithm/{group}"] = choice
        plain = config["hydra"]
        for key in HYDRA:
            value: Any = plain
            for word in key.split(".")[1:]:
                value = value[word]
            self.hydra[key] = str(value)

    def _choice(self, group: str, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        generated = "# Written by `make conf`" in text
        config = self._read(file)
        label = f"model={file.stem}" if group == "model_defaults" else f"{group}={file.stem}"
        if group not in ("model_defaults",) and file.stem != "parts":
            self.groups.setdefault(group, {})[file.stem] = _comment(text)
        if generated or not isinstance(config, dict):
            return
        package = re.match(r"# @package (\S+)", text)
        prefix = group.replace("/", ".") if package is None else "" if package[1] == "_global_" else package[1]
        self._chooses(label, config, group)
        for key, value in _flat(config, prefix):
            self._add(key, label, spelled(value))

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
        file = self.folder / group / f"{choice}.yaml"
        if not file.is_file() or "# Written by" in file.read_text(encoding="utf-8"):
            return
        text = file.read_text(encoding="utf-8")
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
    """(key, value) of the values of a YAML that are not mappings."""
    nested = {key: value for key, value in config.items() if key != "defaults"}
    for key in flat_keys(nested):
        value: Any = nested
        for word in key.split("."):
            value = value[word]
        if not isinstance(value, dict):
            yield f"{prefix}.{key}".lstrip("."), value


def _comment(text: str) -> str:
    """The first sentence of a YAML's comment."""
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    comment = takewhile(lambda line: line.startswith("# "), lines)
    return re.split(r"(?<=[.:;]) ", " ".join(line.removeprefix("# ") for line in comment))[0].rstrip(":;")


def foreign_names(keys: Sequence[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    """{key or group: {trainer: names}} of the names that set it there."""
    known = set(keys)
    found: dict[str, dict[str, list[str]]] = {}
    for trainer, table in TRAINERS.items():
        for name, equivalent in table.items():
            for key in _keys_of(equivalent, known):
                found.setdefault(key, {}).setdefault(trainer, []).append(name)
    return {key: {trainer: tuple(names) for trainer, names in by.items()} for key, by in found.items()}


def _keys_of(equivalent: Equivalent, known: set[str]) -> list[str]:
    """The keys that a foreign name sets: those that get its value, else all that it sets, else that of its note."""
    given = [one.partition("=")[0] for one in equivalent.overrides.split() if "{}" in one]
    chosen = [one.partition("=")[0] for text in equivalent.examples() for one in text.split()]
    return [key for key in dict.fromkeys(given or chosen or _noted(equivalent, known)) if key in known]


def _noted(equivalent: Equivalent, known: set[str]) -> list[str]:
    """The first key that a note names. `reward.NAME.weight` is that of every reward."""
    starts = equivalent.note.removeprefix("nothing to set: ")
    words = re.findall(r"[a-z_]+(?:[./][a-zA-Z_]+)+", equivalent.note)
    named = [word for word in words if word in known or "NAME" in word][:1]
    if equivalent.lacks or (starts != equivalent.note and not any(starts.startswith(word) for word in named)):
        return []
    return [key for word in named for key in ([word] if word in known else _matching(word, known))]


def _matching(pattern: str, known: set[str]) -> list[str]:
    return [key for key in sorted(known) if re.fullmatch(re.escape(pattern).replace("NAME", r"\w+"), key)]


def _override(name: str, variant: Variant) -> str:
    """`KEY=VALUE` with a value that the class accepts, another than the default where one is easily found."""
    return f"{name}={_example_value(variant)}"


def _example_value(variant: Variant) -> str:
    others = [one for one in variant.allowed if one != variant.default]
    if others:
        return others[0]
    for candidate in _numbers(variant.default):
        if _accepts(variant, candidate):
            return spelled(candidate)
    return f"'{variant.default}'" if "$" in variant.default else variant.default.replace("null", "") or "VALUE"


def _numbers(default: str) -> Iterator[float]:
    try:
        value = yaml.safe_load(default) if default else None
    except yaml.YAMLError:
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        others = (value * 2, value / 2 if isinstance(value, float) else value // 2, value + 1)
        yield from (other for other in others if other != value)


def _accepts(variant: Variant, value: Any) -> bool:
    try:
        variant.owner(**{variant.field: value})
    except (ConfigError, TypeError):
        return False
    return True
