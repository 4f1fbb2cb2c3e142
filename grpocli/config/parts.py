"""The registry of parts. A part is a frozen dataclass with its schema, its defaults and its behaviour.

    @part("algorithm/advantage", "std")
    class Std:
        eps: float = 1e-4
        def __call__(self, rewards_PG): ...

makes `algorithm/advantage=std` a choice of Hydra's and `algorithm.advantage.eps` a typed key. The modules of parts are
imported at every start (`PART_MODULES`), so they import nothing heavy at the top.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from string import Formatter
from typing import Annotated, Any, ClassVar, TypeVar, cast, dataclass_transform, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from grpocli.errors import ConfigError, config_errors

T = TypeVar("T")

ESCAPED, USER_CODE = "escaped", "user code"
Escaped = Annotated[str, ESCAPED]
"""A text field, in which `\\n` and `\\t` on the command line are escapes. Not for regular expressions."""
UserCode = Annotated[str, USER_CODE]
"""A field that names code: FILE.py:NAME or module:NAME."""
MARKS = (ESCAPED, USER_CODE)

SCHEMAS = "hydra/schema"
"""The config group of the schemas of all choices, with which their YAML files begin. `--help` hides `hydra`."""
CHOICES: dict[tuple[str, str], tuple[Any, str | None]] = {}
"""{(config group, choice): (class, package)}. Schemas are made when Hydra asks for them: few are used."""
CLASSES: dict[str, type[Any]] = {}
"""{`_target_`: class}. Names are `reward/math` for a choice and `train` for a section; saved configs have them."""

BASES: dict[str, type[Any]] = {}
"""{config group: base class of its parts}, for groups that have one."""


def base(group: str) -> Callable[[type[T]], type[T]]:
    """Declare the base class of a config group's parts, which parts of users must derive from."""

    def register(cls: type[T]) -> type[T]:
        BASES[group] = cls
        return cls

    return register


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def part(group: str, name: str, *, package: str | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass and register it as choice `name` of config group `group`.

    package: the prefix of its keys, by default the group with dots. Choices of a group that can be combined, such as
    rewards, need different packages.
    """

    def register(cls: type[T]) -> type[T]:
        made = section(package or group.replace("/", "."))(cls)
        named(f"{group}/{name}" if group else name.removesuffix("_schema"))(made)
        CHOICES[group, name] = made, package
        return made

    return register


def named(name: str) -> Callable[[type[T]], type[T]]:
    """Register the class under `_target_: NAME`."""

    def register(cls: type[T]) -> type[T]:
        CLASSES[name] = cls
        cls.config_target = name  # type: ignore[attr-defined]
        return cls

    return register


def target_of(cls: type[Any]) -> str:
    """The `_target_` of a class in configs: its registered name, or FILE.py:CLASS."""
    target: str | None = cls.__dict__.get("config_target")
    return target or f"{cls.__module__}.{cls.__qualname__}"


@cache
def _marked_keys(cls: type[Any]) -> frozenset[tuple[str, str]]:
    """{(mark, key)} of the fields of a part and its sections that are `Escaped` or `UserCode`."""
    found: set[tuple[str, str]] = set()
    for name, hint in get_type_hints(cls, include_extras=True).items():
        found |= {(mark, name) for mark in _marks(hint)}
        if dataclasses.is_dataclass(hint) and hasattr(hint, "config_key"):
            found |= {(mark, f"{name}.{key}") for mark, key in _marked_keys(cast("Any", hint))}
    return frozenset(found)


def _marks(hint: Any) -> Iterator[str]:
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if mark in MARKS)
    for inner in get_args(hint):
        yield from _marks(inner)


def is_marked(key: str, mark: str) -> bool:
    """Whether a key is a field of that kind in any part, also below a name as in `task.gsm8k.system_prompt`."""
    for (group, _), (cls, _) in CHOICES.items():
        first = group.partition("/")[0]
        for kind, name in _marked_keys(cls):
            below = key.startswith(f"{first}.") and key.endswith(f".{name}")
            if kind == mark and (below if first else key == name):
                return True
    return False


def config_node(cls: Any) -> Any:
    """The schema of a part as a new config. Fields of type `dict` accept new keys without `+`."""
    made = schema(cls)
    own, config = _dicts(made), OmegaConf.structured(made)
    for name in own:
        OmegaConf.set_struct(OmegaConf.select(config, name), False)
    return config


def _dicts(made: type[Any], prefix: str = "") -> list[str]:
    """The names of fields of type `dict`, including those of sections."""
    found = []
    for f in dataclasses.fields(made):
        if f.default_factory is dict:
            found.append(prefix + f.name)
        elif "section" in f.metadata:
            found += _dicts(f.metadata["section"], f"{prefix}{f.name}.")
    return found


def _changed(default: Any) -> dict[str, Any]:
    """The values in which a section's default differs from its class's defaults."""
    make = cast("Callable[[], Any]", type(default))
    plain = make()
    values = {f.name: (getattr(default, f.name), getattr(plain, f.name)) for f in dataclasses.fields(default)}
    return {name: value for name, (value, usual) in values.items() if value != usual}


def choices_of(group: str) -> list[str]:
    """The choices of a config group that are classes."""
    return [name for of, name in CHOICES if of == group]


def stored(group: str) -> dict[str, Any]:
    """{choice: schema} of a config group's choices that are classes."""
    return {name: config_node(CHOICES[group, name][0]) for name in choices_of(group)}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def section(key: str) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose keys are below `key`, without making it a choice of a group."""

    def make(cls: type[T]) -> type[T]:
        made: type[T] = dataclasses.dataclass(frozen=True)(cls)
        made.config_key = key  # type: ignore[attr-defined]
        return named(key)(made) if key else made

    return make


@cache
def schema(cls: type[Any]) -> type[Any]:
    """The mutable twin of a part with its `_target_`, into which Hydra merges overrides.

    The part itself does not work, because OmegaConf makes configs of frozen dataclasses read-only.
    """
    hints = get_type_hints(cls)
    fields: list[tuple[str, Any, Any]] = [("_target_", str, dataclasses.field(default=target_of(cls)))]
    for f in dataclasses.fields(cls):
        if get_origin(hints[f.name]) is ClassVar:
            continue
        fields.append((f.name, *_schema_field(hints[f.name], f)))
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)


def interpolate(key: str) -> Any:
    """A field whose default is the value of another key; None outside of a config."""
    return dataclasses.field(default=None, metadata={"interpolate": key})


def _schema_field(hint: Any, f: dataclasses.Field[Any]) -> tuple[Any, Any]:
    if "interpolate" in f.metadata:
        return hint, dataclasses.field(default="${" + f.metadata["interpolate"] + "}")
    if dataclasses.is_dataclass(hint) and hasattr(hint, "config_key"):
        nested: Any = schema(hint)  # type: ignore[arg-type]
        given = {} if f.default is dataclasses.MISSING else _changed(f.default)
        return nested, dataclasses.field(default_factory=partial(nested, **given), metadata={"section": nested})
    if f.default is not dataclasses.MISSING:
        return hint, dataclasses.field(default=f.default)
    if f.default_factory is not dataclasses.MISSING:
        return hint, dataclasses.field(default_factory=f.default_factory)
    return hint, dataclasses.field()


def key_of(owner: object, field: str) -> str:
    """`rollout.group_size` for the field `group_size` of a Rollout."""
    prefix = getattr(owner, "config_key", "")
    return f"{prefix}.{field}" if prefix else field


def require_part(value: object, key: str) -> None:
    """Raise ConfigError if an override or a YAML has put a plain value, or keys without a choice, in a part's place."""
    if isinstance(value, dict):
        hint = f"choose one with {key}=NAME, or start your YAML with `defaults: [NAME, _self_]`"
        raise ConfigError("the keys belong to no choice", key=key, hint=hint)
    if value is None or isinstance(value, str | int | float | list):
        raise ConfigError("must be a part, not a value", key=key, value=value, hint=f"set its keys: {key}.KEY=VALUE")


def require(owner: object, field: str, ok: bool, problem: str, hint: str = "") -> None:
    """Raise ConfigError with the field's key and value unless `ok`."""
    if not ok:
        value = getattr(owner, field)
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(problem, key=key_of(owner, field), value=shown, hint=hint)


def one_of(owner: object, field: str, choices: Iterable[str], what: str = "one of") -> None:
    """Raise ConfigError with the nearest valid name unless the field is one of `choices`."""
    value, choices = getattr(owner, field), list(choices)
    if value not in choices:
        problem = f"choose {what} {', '.join(choices)}{nearest(str(value), choices)}"
        raise ConfigError(problem, key=key_of(owner, field), value=value)


def check_regex(owner: object, field: str, group: str = "") -> None:
    """Raise ConfigError unless the field is a regular expression. group: the meaning of a required group."""
    pattern = getattr(owner, field)
    with config_errors(re.error, says="is not a regular expression: {}", key=key_of(owner, field), value=pattern):
        groups = re.compile(pattern).groups
    require(owner, field, not group or groups > 0, f"needs a group: {group}")


def template_fields(template: str, key: str = "task.prompt_template") -> list[str]:
    """The names in {braces}. Raises ConfigError for unmatched braces."""
    hint = "double the braces that stand for themselves"
    with config_errors(ValueError, key=key, value=repr(template), hint=hint):
        return [field for _, field, _, _ in Formatter().parse(template) if field is not None]


class ByColumn(Formatter):
    """Fills templates in whose fields a dot is a part of the column's name."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name


def nearest(word: str, names: Iterable[str]) -> str:
    """`; did you mean "x"?` for the nearest name, best of the same letters; "" if none is close."""
    close = difflib.get_close_matches(word, list(names), n=5, cutoff=0.5)
    best = max(close, key=lambda name: sorted(name) == sorted(word), default="")
    return f'; did you mean "{best}"?' if best else ""


def nearest_key(key: str, keys: Iterable[str]) -> str:
    """`nearest` for keys: names that are alike in sections that are alike, or the same name in any section.

    Of a key that no longer exists another one of its section says nothing.
    """

    def likeness(known: str) -> float:
        pairs = zip(key.rpartition(".")[::2], known.rpartition(".")[::2], strict=True)
        section, name = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return section + name if name == 1 or min(section, name) >= 0.6 else 0

    best = max(keys, key=likeness)
    return f'; did you mean "{best}"?' if likeness(best) else ""
