"""Texts of a run without secrets and without folders of this machine, for files that others read."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from grpocli.config.environment import OVERRIDES, SECRET
from grpocli.config.parts import CLASSES
from grpocli.config.yaml_text import leaves
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import Changes
from grpocli.text import CREDENTIALS, masked

ELSEWHERE = "NOT_PUSHED"
"""Stands for the folder of a file that is neither below the working directory nor below the home folder."""
HIDDEN = "NOT_PUSHED_SECRET"
"""Stands for a secret."""
SHORTEST = 8
"""The shortest secret that is replaced wherever it occurs: shorter ones occur in other words."""
SIGNED = re.compile(rf"(?<=[?&])[\w.-]*(?:{SECRET.pattern}|sig)[\w.-]*=(?P<secret>[^&\s'\"<>]+)", re.IGNORECASE)
"""Matches a parameter of an address that signs it, such as X-Amz-Signature."""
PATH = r"/(?:[^\s/'\",\[\]{}:=]+/)*[^\s/'\",\[\]{}:=]+"
WHOLE = re.compile(rf"(?P<path>{PATH})(:[A-Za-z_]\w*)?")
"""A value that is a path, or FILE.py:NAME."""
TYPED = re.compile(rf"(?<=[=\[,'\"(])(?P<path>{PATH})")
"""A path in an override, such as `reward=[/home/me/rewards.py:score,math]`."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Replaces secrets and local folders in texts. paths: {path: what stands for it}. secrets: patterns, each with a
    group `secret`, which is hidden."""

    paths: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[re.Pattern[str], ...] = (CREDENTIALS, SIGNED)

    @classmethod
    def of(cls, config: Mapping[str, Any], *folders: Path, former: Sequence[Changes] = ()) -> Publisher:
        """For the texts of a run with this config. folders: further ones whose files are shown by name. former: the
        changes of its sessions, which have values that the config no longer has."""
        found = {path: _public(path) for part in (config, *former) for path in _paths(part)}
        found |= {str(folder.absolute()): folder.name for folder in folders}
        for folder, shown in ((Path.cwd(), "."), (Path.home(), "~")):
            if len(folder.parts) > 1:  # of a root folder every text has one
                found[str(folder)] = shown
        return cls(found, (CREDENTIALS, SIGNED, *_patterns(set(_secret_values(config, former)))))

    @classmethod
    def of_run(cls, folder: Path) -> Publisher:
        """For the texts of the run in a folder. Raises ConfigError if its config, which has its secrets, is broken."""
        run = SavedRun(folder).check()
        return cls.of(run.config, folder, former=[session.changes for session in run.sessions])

    def __call__(self, text: str) -> str:
        text = masked(text)
        for pattern in self.secrets:
            text = pattern.sub(_hidden, text)
        if not self.paths:
            return text
        longest_first = sorted(self.paths, key=len, reverse=True)
        known = "|".join(rf"(?<![\w/.-]){re.escape(one)}(?![\w-])" for one in longest_first)
        return re.sub(known, lambda found: self.paths[found[0]], text)


def _hidden(found: re.Match[str]) -> str:
    """The matched text with HIDDEN in the place of its secret."""
    start, end = (place - found.start() for place in found.span("secret"))
    return f"{found[0][:start]}{HIDDEN}{found[0][end:]}"


def _patterns(named: Collection[tuple[str, str]]) -> Iterator[re.Pattern[str]]:
    """Match long secrets wherever they are, also in JSON and HTML, and short ones as the values of their keys.

    named: (last word of the key, value) of secrets in the config.
    """
    long = _secrets() | {value for _, value in named if len(value) >= SHORTEST}
    written = {form for secret in long for form in (secret, json.dumps(secret)[1:-1], html.escape(secret))}
    if written:
        longest_first = sorted(written, key=len, reverse=True)
        yield re.compile(f"(?P<secret>{'|'.join(map(re.escape, longest_first))})")
    for key, value in named:
        if value not in long:
            yield re.compile(rf"\b{re.escape(key)}['\"]?[=:]\s*['\"]?(?P<secret>{re.escape(value)})(?!\w)")


def _secret_values(config: Mapping[str, Any], former: Sequence[Changes]) -> Iterator[tuple[str, str]]:
    """(last word of the key, value) of the texts of a run whose keys are named as secrets.

    Not those that parts of grpocli declare, which are names of variables and files: `reward.judge.api_key`.
    """
    from grpocli.composition.overrides import leaves_of, parse  # which loads Hydra

    declared = set(_declared(config))
    nodes = ({name: node for name, node in config.items() if name != OVERRIDES}, *former)
    overrides = filter(None, map(parse, map(str, config.get(OVERRIDES) or [])))
    for key, value in (*chain(*map(leaves, nodes)), *chain(*map(leaves_of, overrides))):
        words = key.split(".")
        named = [".".join(words[: i + 1]) for i, word in enumerate(words) if SECRET.search(word)]
        if isinstance(value, str) and value and not value.startswith("${") and value != "???" and set(named) - declared:
            yield words[-1], value


def _declared(node: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a config that are fields of parts of grpocli, or names of parts."""
    if isinstance(node, Mapping):
        cls = CLASSES.get(str(node.get("_target_")))
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        for name, value in node.items():
            key = f"{prefix}.{name}".lstrip(".")
            if name in names or (isinstance(value, Mapping) and "_target_" in value):
                yield key
            yield from _declared(value, key)


def _paths(node: Any) -> Iterator[str]:
    """The absolute paths among the values of a config and in its overrides."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == OVERRIDES and isinstance(value, list):
                yield from (found["path"] for text in value for found in TYPED.finditer(str(text)))
            else:
                yield from _paths(value)
    elif isinstance(node, list | tuple):
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


def _secrets() -> frozenset[str]:
    """The values of environment variables that are named as secrets, and the token of the hub."""
    from huggingface_hub import get_token

    named = (value for name, value in os.environ.items() if SECRET.search(name))
    return frozenset(value for value in (*named, get_token() or "") if len(value) >= SHORTEST)
