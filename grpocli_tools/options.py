"""The command lines of this package's commands, whose help and options are in options.yaml."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from grpocli.cli import plain_parser
from grpocli.config.yaml_text import LOADER

TYPES: dict[str, Callable[[str], Any]] = {"path": Path, "int": int, "float": float}


def parser_of(command: str, doc: str | None, **more: dict[str, Any]) -> argparse.ArgumentParser:
    """The parser of a command. doc: its module's docstring, "`grpocli NAME`: TEXT".

    more: further arguments of options, by their names.
    """
    spec = yaml.load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"), LOADER)[command]
    about = (doc or "").partition("\n")[0].partition(": ")[2]
    parser = plain_parser(command, about[:1].upper() + about[1:], spec["examples"])
    if "usage" in spec:
        parser.usage = f"grpocli {command} [GROUP=CHOICE ...] [KEY=VALUE ...] {spec['usage']}"
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for `grpocli train`")
        config_dir = "a folder with config groups and recipes of your own"
        parser.add_argument("--config-dir", "-cd", metavar="DIR", help=config_dir)
    for name, given in spec["options"].items():
        option = given | more.get(name.lstrip("-"), {})
        names = [name, option.pop("alias")] if "alias" in option else [name]
        if "type" in given:
            option["type"] = TYPES[given["type"]]
        if "range" in option:
            least, most = option.pop("range")
            option["type"] = _between(least, most, option["type"])
        parser.add_argument(*names, **option)
    return parser


def _between(least: float, most: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            bounds = f"{least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: must be {bounds}")
        return value

    return number
