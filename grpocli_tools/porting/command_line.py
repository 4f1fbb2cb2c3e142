"""The command line of a script: the dataclasses that TrlParser or HfArgumentParser fills."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.errors import ConfigError
from grpocli_tools.porting.foreign_names import TRL, UNSTATED
from grpocli_tools.porting.source import read_mapping

PARSING = ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses")
"""Methods that return the arguments of a command line."""
DATACLASS_PARSERS = ("TrlParser", "HfArgumentParser")
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(slots=True)
class CommandLine:
    """The arguments that were given, and the fields of the dataclasses that the script defines.

    defaults: their default values; without those that have none. own: the names that mean nothing to TRL.
    base: defaults of local subclasses of GRPOConfig, which replace TRL's. fills: whether a parser fills dataclasses,
    and so knows the fields of TRL's own classes.
    """

    given: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, ast.expr] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    base: dict[str, ast.expr] = field(default_factory=dict)
    fills: bool = False

    def value(self, name: str) -> Any:
        """A value that was given, or the default of TRL; an expression for a default of the script; UNSTATED."""
        if name in self.given or name in self.defaults:
            return self.given.get(name, self.defaults.get(name))
        return TRL[name].default if self.fills and name in TRL else UNSTATED


def given_arguments(words: Sequence[str], script: Path, tree: ast.Module) -> CommandLine:
    """The command line of a script, with the arguments `--name value ...` that it got; a name alone is true.

    `--config FILE` is read as TrlParser reads it; arguments replace its values.
    Raises ConfigError for a value without a name or an unreadable file.
    """
    line = CommandLine(_parsed(words))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            line.fills |= last_name(node.func) in DATACLASS_PARSERS
        elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            _add_fields(line, node)
    if line.fills and isinstance(file := line.given.pop("config", None), str):
        line.given = _config(Path(file), script) | line.given
    return line


def is_parsing(node: ast.expr) -> bool:
    """Whether an expression is a call that parses a command line, or a part of its result."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(node, ast.Call) and last_name(node.func) in PARSING


def last_name(node: ast.expr | None) -> str:
    """`b` of the expressions `b` and `a.b`; "" for others."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


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


def _add_fields(line: CommandLine, cls: ast.ClassDef) -> None:
    """Add the fields of a dataclass; a default that is made by a function is a call, which is not read."""
    for statement in cls.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, value = statement.target.id, statement.value
        if name not in TRL or name == "reward_funcs":
            line.own.add(name)
        if isinstance(value, ast.Call) and last_name(value.func) == "field":
            value = next((one.value for one in value.keywords if one.arg == "default"), value)
        if value is not None:
            line.defaults[name] = value
            if "GRPOConfig" in map(last_name, cls.bases):
                line.base[name] = value
