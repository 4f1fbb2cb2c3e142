"""`make conf`: a commented YAML for every choice, written from the dataclasses: `python -m grpocli.launch.conf_files`.

The dataclass stays the only source of defaults and types; a test holds the files equal to it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from grpocli.config.build import TARGET
from grpocli.config.field_docs import class_doc, field_docs
from grpocli.config.parts import CLASSES, SCHEMAS, choices_of, typed_choice
from grpocli.launch.compose import register_parts
from grpocli.launch.sources import conf_dir

WIDTH = 120
INNER = "algorithm/parts"
"""What every algorithm begins with; nobody chooses it."""
MARK = "# Written by `make conf` from the class "


def files() -> dict[str, str]:
    """{path below conf/: content} of every choice that is a dataclass of this package."""
    register_parts()
    return {
        f"{group}/{choice}.yaml": content(group, choice)
        for group in _groups()
        for choice in choices_of(group)
        if f"{group}/{choice}" != INNER
    }


def content(group: str, choice: str) -> str:
    """The YAML of a choice: its keys with their defaults, each below its meaning."""
    cls = CLASSES[f"{group}/{choice}"]
    typed = typed_choice(group, choice)
    values = OmegaConf.to_container(OmegaConf.structured(typed.node), resolve=False)
    lines = [f"# @package {typed.package}"] if typed.package else []
    lines += [*_header(cls), f"{MARK}{cls.__name__}; change the defaults there."]
    lines += ["defaults:", f"  - /{SCHEMAS}/{group}/{choice}@_here_", "  - _self_", *_keys(cls, values)]
    return "\n".join(lines) + "\n"


def _groups() -> list[str]:
    """The config groups of this package's parts."""
    own = [name for name, cls in CLASSES.items() if "/" in name and cls.__module__.startswith("grpocli.")]
    return sorted({name.rpartition("/")[0] for name in own})


def _keys(cls: type[Any], values: Any, indent: str = "") -> Iterator[str]:
    docs = field_docs(cls)
    for name, value in values.items():
        if name == TARGET:
            continue
        yield from _comment(docs.get(name, ""), indent)
        section = CLASSES.get(str(value.get(TARGET))) if isinstance(value, dict) else None
        if section:
            yield f"{indent}{name}:"
            yield from _keys(section, value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {textwrap.indent(_plain(value), indent).lstrip()}"


def _header(cls: type[Any]) -> list[str]:
    """The class's docstring, its paragraphs apart."""
    paragraphs = [_comment(" ".join(text.split()), "") for text in class_doc(cls).split("\n\n")]
    return [line for paragraph in paragraphs for line in (*paragraph, "#")]


def _plain(value: Any) -> str:
    """A value as YAML: on one line, or a text of several lines as a block."""
    if isinstance(value, str) and "\n" in value:
        return yaml.safe_dump(value, default_style="|", allow_unicode=True, width=10_000).rstrip("\n")
    one = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10_000)
    return one.strip()[1:-1]


def _comment(text: str, indent: str) -> list[str]:
    marks = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=marks, subsequent_indent=marks, break_on_hyphens=False)


def write(folder: Path) -> None:
    """Write all files, and remove those of choices that are gone."""
    made = files()
    for path in folder.rglob("*.yaml"):
        if MARK in path.read_text() and str(path.relative_to(folder)) not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else conf_dir()))
