"""`make conf`: commented YAML files of all choices, and of the keys outside of config groups, from the dataclasses.

    python scripts/conf_files.py

The dataclass stays the only source of defaults and types; a test compares the files with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf

from grpocli.composition.compose import register_parts
from grpocli.composition.hydra_sources import conf_dir
from grpocli.config import yaml_text
from grpocli.config.parts import CHOICES, CLASSES, SCHEMAS, choices_of, config_node
from grpocli.config.yaml_text import TARGET
from grpocli_tools.explain.formulas import class_doc, field_docs, summary

WIDTH = 120
ALGORITHM_PARTS = "algorithm/parts"
"""The choice that every algorithm's YAML starts from; it has no file."""
RUN = "run.yaml"
WRITTEN_FROM = "# Written by `make conf` from the class "


def files() -> dict[str, str]:
    """{path below conf/: content} of every choice that is a dataclass of this package, and of the keys of no group."""
    register_parts()
    choices = {
        f"{group}/{choice}.yaml": content(group, choice)
        for group in _groups()
        for choice in choices_of(group)
        if f"{group}/{choice}" != ALGORITHM_PARTS
    }
    return {**choices, RUN: run_content()}


def content(group: str, choice: str) -> str:
    """The YAML of a choice: its keys with their defaults, each below its documentation as a comment."""
    cls, package = CHOICES[group, choice]
    head = [f"# @package {package}"] if package else []
    key = package or group.replace("/", ".")
    text = _yaml(cls, f"/{SCHEMAS}/{group}/{choice}@_here_", _values(config_node(cls)), f"{key}.")
    return "\n".join([*head, text])


def run_content() -> str:
    """The YAML of the keys that belong to no config group."""
    cls = CLASSES["run"]
    return _yaml(cls, "run_schema", {key: value for key, value in _values(cls).items() if value != MISSING}, "")


def _yaml(cls: type[Any], schema: str, values: dict[str, Any], prefix: str) -> str:
    written_from = f"{WRITTEN_FROM}{cls.__name__}; change the defaults there."
    return "\n".join(
        [*_header(cls), written_from, "defaults:", f"  - {schema}", "  - _self_", *_keys(cls, values, prefix), ""]
    )


@functools.cache
def _choices_defaults() -> dict[str, str]:
    """{key: a sentence about the models and algorithms that set it}, from conf/model_defaults/ and the like."""
    found: dict[str, str] = {}
    for file in sorted(Path(conf_dir()).glob("*_defaults/*.yaml")):
        choice = f"{file.parent.name.removesuffix('_defaults')}={file.stem}"
        values = yaml_text.load(file.read_text())
        config = OmegaConf.create(values)
        for key, _ in yaml_text.nodes(values, lists=False):
            value = OmegaConf.select(config, key) if key else config
            if not OmegaConf.is_config(value):
                sets = f" {choice} sets {_yaml_value(value)}, which overrides this file."
                found[key] = found.get(key, "") + sets
    return found


def _values(node: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.structured(node), resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _groups() -> list[str]:
    """The config groups of this package's parts."""
    own = [name for name, cls in CLASSES.items() if "/" in name and cls.__module__.startswith("grpocli.")]
    return sorted({name.rpartition("/")[0] for name in own})


def _keys(cls: type[Any], values: Any, prefix: str, indent: str = "") -> Iterator[str]:
    """The lines of a mapping. prefix: its key in the config, with a dot, or nothing."""
    docs, defaults = field_docs(cls), {f.name: f.default for f in dataclasses.fields(cls)}
    for name, value in values.items():
        if name == TARGET:
            continue
        section = type(defaults[name]) if dataclasses.is_dataclass(defaults[name]) else None
        doc = docs.get(name) or (summary(section) if section else "")
        yield from _comment(doc + _choices_defaults().get(f"{prefix}{name}", ""), indent)
        if section:
            yield f"{indent}{name}:"
            yield from _keys(section, value, f"{prefix}{name}.", f"{indent}  ")
        else:
            yield f"{indent}{name}: {textwrap.indent(_yaml_value(value), indent).lstrip()}"


def _header(cls: type[Any]) -> list[str]:
    """The class's docstring as comment lines, with an empty comment after each paragraph."""
    paragraphs = [_comment(" ".join(text.split()), "") for text in class_doc(cls).split("\n\n")]
    return [line for paragraph in paragraphs for line in (*paragraph, "#")]


def _yaml_value(value: Any) -> str:
    """A value as YAML: on one line, or a text of several lines as a block."""
    if isinstance(value, str) and "\n" in value:
        return yaml.safe_dump(value, default_style="|", allow_unicode=True, width=10_000).rstrip("\n")
    one = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10_000)
    return one.strip()[1:-1]


def _comment(text: str, indent: str) -> list[str]:
    marks = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=marks, subsequent_indent=marks, break_on_hyphens=False)


def write(folder: Path) -> None:
    """Write all files, and remove those of choices that no longer exist."""
    made = files()
    for path in folder.rglob("*.yaml"):
        if WRITTEN_FROM in path.read_text() and str(path.relative_to(folder)) not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=conf_dir())
    write(Path(parser.parse_args().folder))
