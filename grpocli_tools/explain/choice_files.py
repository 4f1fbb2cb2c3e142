"""What the YAML files of conf/ choose and set: choices of groups, recipes, and the default run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from grpocli.config import yaml_text
from grpocli.config.parts import CLASSES
from grpocli.config.yaml_text import flat
from grpocli_tools.explain.documentation import summary

HYDRA = {
    "hydra.run.dir": "Folder of the run.",
    "hydra.sweep.dir": "Folder of a sweep, with `-m`.",
    "hydra.sweep.subdir": "Folder of each run in the folder of a sweep.",
}
"""The keys of Hydra that belong to a run; conf/train.yaml has their defaults."""
GENERATED = "# Written by `make conf`"


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
    """(key, value) of the values of a YAML that are not mappings."""
    yield from flat({name: value for name, value in config.items() if name != "defaults"}, prefix).items()


def _comment(text: str) -> str:
    """The first sentence of a YAML's comment."""
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
