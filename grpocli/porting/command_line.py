"""The command line of a script: arguments of argparse, and dataclasses that TrlParser or HfArgumentParser fills."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.config.foreign_names import TRL, UNSTATED
from grpocli.errors import ConfigError
from grpocli.porting.source import read_mapping

PARSING = (
    *("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses"),
    *("parse_yaml_file", "parse_json_file", "parse_dict"),
)
"""Methods that return the arguments of a command line."""
DATACLASS_PARSERS = ("TrlParser", "HfArgumentParser")
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a script defines. default: None if it has none. kind: the name of its type. many: a list."""

    default: ast.expr | None
    kind: str = ""
    required: bool = False
    many: bool = False


@dataclass(slots=True)
class CommandLine:
    """The arguments that a script defines, and the values that were given.

    own: the names that mean nothing to TRL. base: fields of local subclasses of GRPOConfig, which replace TRL's
    defaults. fills: whether a parser fills dataclasses, and so knows the fields of TRL's own classes.
    """

    given: dict[str, Any] = field(default_factory=dict)
    defined: dict[str, Argument] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    base: dict[str, ast.expr] = field(default_factory=dict)
    fills: bool = False

    def has(self, name: str) -> bool:
        """Whether a name is an argument of the script."""
        return name in self.defined or (self.fills and name in TRL)

    def value(self, name: str) -> Any:
        """A value that was given, or the default of TRL; an expression for a default of the script; UNSTATED."""
        if name in self.given:
            value, defined = self.given[name], self.defined.get(name)
            value = _converted(value, defined.kind) if defined else value
            return [value] if defined and defined.many and not isinstance(value, list) else value
        if name in self.defined:
            default = self.defined[name].default
            return UNSTATED if default is None else default
        if name in self.base:
            return self.base[name]
        return TRL[name].default if self.fills and name in TRL else UNSTATED


def given_arguments(words: Sequence[str], script: Path, tree: ast.Module) -> CommandLine:
    """The command line of a script, with the arguments `--name value ...` that it got; a name alone is true.

    `--config FILE` is read as TrlParser reads it, unless the script defines a `--config`; arguments replace its values.
    Raises ConfigError for a value without a name or an unreadable file.
    """
    line = CommandLine(defined=dict(_defined(tree)))
    line.own = set(line.defined)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    line.fills = any(_last_name(one.func) in DATACLASS_PARSERS for one in calls)
    for cls in _dataclasses(tree):
        kinds = {_last_name(one) for one in cls.bases}
        fields = dict(_fields(cls))
        if "GRPOConfig" in kinds:
            line.base |= {name: one.default for name, one in fields.items() if one.default is not None}
            fields = {name: one for name, one in fields.items() if name not in TRL}
        line.defined |= fields
        line.own |= {name for name in fields if name not in TRL or name == "reward_funcs"}
    values = _parsed(words)
    if isinstance(file := values.get("config"), str) and "config" not in line.defined:
        del values["config"]
        values = _config(Path(file), script) | values
    line.given = values
    return line


def argument_names(tree: ast.Module) -> frozenset[str]:
    """Names that hold parsed arguments: assigned from a parser, or parameters of functions that get them."""
    names: set[str] = set()
    nodes = list(ast.walk(tree))
    functions = {one.name: one for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    for _ in range(3):  # parser -> main(args) -> helper(args)
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_parsing(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            elif isinstance(node, ast.Call) and (function := functions.get(_last_name(node.func))):
                parameters = [one.arg for one in function.args.args]
                for index, argument in enumerate(node.args):
                    if isinstance(argument, ast.Starred) and is_parsing(argument.value, names):
                        names |= set(parameters[index:])
                    elif is_parsing(argument, names):
                        names |= set(parameters[index : index + 1])
                names |= {str(one.arg) for one in node.keywords if is_parsing(one.value, names)}
    return frozenset(names)


def is_parsing(node: ast.expr | None, names: Container[str]) -> bool:
    """Whether an expression is a call that parses a command line, a part of its result, or a name that holds one."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Call) and is_parsing(node.value, names)
    if isinstance(node, ast.Call):
        return _last_name(node.func) in PARSING
    return isinstance(node, ast.Name) and node.id in names


def _config(file: Path, script: Path) -> dict[str, Any]:
    """The values of a config; a relative path is looked for here, then beside the script."""
    beside = script.parent / file
    return read_mapping(beside if not file.is_file() and beside.is_file() else file)


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [yaml_text.load(value)] if equals else []
        elif name:
            found[name].append(yaml_text.load(word.rstrip(",")))
        elif word.endswith(SUFFIXES):
            found["config"] = [word]
        else:
            raise ConfigError("must be --NAME", key="--", value=word, hint="write -- --learning_rate 1e-5 ...")
    return {name: True if not one else one[0] if len(one) == 1 else one for name, one in found.items()}


def _converted(value: Any, kind: str) -> Any:
    """A value as argparse's `type` makes it; unchanged if it cannot be."""
    try:
        convert = {"int": int, "float": float, "str": str}.get(kind)
        return convert(value) if convert and not isinstance(value, list | bool) else value
    except (TypeError, ValueError):
        return value


def _defined(tree: ast.Module) -> Iterator[tuple[str, Argument]]:
    """The arguments of `add_argument` calls."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _last_name(call.func) != "add_argument":
            continue
        flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        keywords = {one.arg: one.value for one in call.keywords}
        named = keywords.get("dest")
        flag = next((one for one in flags if one.startswith("--")), flags[0] if flags else "")
        name = named.value if isinstance(named, ast.Constant) else flag.lstrip("-").replace("-", "_")
        if not isinstance(name, str) or not name:
            continue
        default, action = keywords.get("default"), keywords.get("action")
        required = isinstance(one := keywords.get("required"), ast.Constant) and one.value is True
        if default is None and not required and flag.startswith("-"):
            switch = isinstance(action, ast.Constant) and action.value in ("store_true", "store_false")
            default = ast.Constant(
                action.value == "store_false" if switch and isinstance(action, ast.Constant) else None
            )
        many = isinstance(one := keywords.get("nargs"), ast.Constant) and one.value in ("+", "*")
        yield name, Argument(default, _last_name(keywords.get("type")), required, many)


def _dataclasses(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            marks = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
            if any(_last_name(one) == "dataclass" for one in marks):
                yield node


def _fields(cls: ast.ClassDef) -> Iterator[tuple[str, Argument]]:
    for statement in cls.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        value = statement.value
        if isinstance(value, ast.Call) and _last_name(value.func) == "field":
            keywords: Mapping[str | None, ast.expr] = {one.arg: one.value for one in value.keywords}
            made = keywords.get("default_factory")
            value = keywords.get("default", made.body if isinstance(made, ast.Lambda) else None)
        hint = statement.annotation
        many = isinstance(hint, ast.Subscript) and _last_name(hint.value).lower() in ("list", "sequence")
        yield statement.target.id, Argument(value, _last_name(hint), required=value is None, many=many)


def _last_name(node: ast.expr | None) -> str:
    """`b` of the expressions `b` and `a.b`; "" for others."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
