"""Texts of a run without secrets and without folders of this machine, for files that others read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpocli.config.environment import SECRET
from grpocli.files import regular
from grpocli.masking import masked

ELSEWHERE = "NOT_PUSHED"
"""Stands for the folder of a file that is neither below the working directory nor below the home folder."""
HIDDEN = "SECRET"
SHORTEST = 8
"""The shortest value of an environment variable that is taken for a secret: shorter ones occur in other words."""
PATH = r"/(?:[^\s/'\",\[\]{}:=]+/)*[^\s/'\",\[\]{}:=]+"
WHOLE = re.compile(rf"(?P<path>{PATH})(:[A-Za-z_]\w*)?")
"""A value that is a path, or FILE.py:NAME."""
TYPED = re.compile(rf"(?<=[=\[,'\"(])(?P<path>{PATH})")
"""A path in an override, such as `reward=[/home/me/rewards.py:score,math]`."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Replaces secrets and local folders in texts. replacements: {text: what stands for it}."""

    replacements: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], *folders: Path) -> Publisher:
        """For the texts of a run with this config. folders: further ones whose files are shown by name."""
        found = {path: _public(path) for path in _paths(config)}
        found |= {str(folder.absolute()): folder.name for folder in folders}
        for folder, shown in ((Path.cwd(), "."), (Path.home(), "~")):
            if len(folder.parts) > 1:  # of a root folder every text has one
                found[str(folder)] = shown
        return cls(found | dict.fromkeys(_secrets(), HIDDEN))

    @classmethod
    def of_file(cls, config: Path, *folders: Path) -> Publisher:
        """For the texts of a run with this config.yaml."""
        loaded = yaml.safe_load(regular(config).read_text()) or {}
        return cls.of(loaded if isinstance(loaded, dict) else {}, *folders)

    def __call__(self, text: str) -> str:
        if not self.replacements:
            return masked(text)
        longest_first = sorted(self.replacements, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w/.-]){re.escape(one)}(?![\w-])" for one in longest_first)
        return re.sub(pattern, lambda found: self.replacements[found[0]], masked(text))


def _paths(node: Any) -> Iterator[str]:
    """The absolute paths among the values of a config and in its overrides."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "overrides" and isinstance(value, list):
                yield from (found["path"] for text in value for found in TYPED.finditer(str(text)))
            else:
                yield from _paths(value)
    elif isinstance(node, list):
        for value in node:
            yield from _paths(value)
    elif isinstance(node, str) and (found := WHOLE.fullmatch(node)) and Path(found["path"]).parts[2:]:
        yield found["path"]


def _public(path: str) -> str:
    """A path below the working directory or the home folder, relative to it; the name of any other."""
    for folder, start in ((Path.cwd(), ""), (Path.home(), "~/")):
        if len(folder.parts) > 1 and Path(path).is_relative_to(folder) and Path(path) != folder:
            return f"{start}{Path(path).relative_to(folder)}"
    return f"{ELSEWHERE}/{Path(path).name}"


def _secrets() -> Iterable[str]:
    """The values of environment variables that are named as secrets, and the token of the hub."""
    from huggingface_hub import get_token

    named = (value for name, value in os.environ.items() if SECRET.search(name))
    return {value for value in (*named, get_token() or "") if len(value) >= SHORTEST}
