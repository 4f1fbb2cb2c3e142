"""The result of a translation: overrides, settings without a counterpart, and what a reader must check."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote

from grpocli.composition.overrides import to_text
from grpocli.rollout.vllm.engine_parts import VllmColocate
from grpocli.text import clean, one_line, shorten
from grpocli_tools.porting.foreign_names import ACCELERATE, UNSTATED, Equivalent

COLOCATED = [f.name for f in dataclasses.fields(VllmColocate)]
UNKNOWN = "grpocli does not know this setting; set its equivalent yourself, or leave it out"
MISSING = "???"
"""The value of a choice that the reader must make: a command with it does not train."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is not a literal, such as a call."""

    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.text} (line {self.line})"


@dataclass(frozen=True, slots=True)
class OverrideLine:
    """An override."""

    key: str
    value: Any
    names: tuple[str, ...] = ()
    """The settings that it is from."""
    note: str = ""
    """A remark on it."""

    @property
    def comment(self) -> str:
        """Where it comes from, and the remark."""
        return ": ".join(filter(None, [", ".join(self.names), self.note]))

    @property
    def override(self) -> str:
        text = to_text(self.value, Quote.double).replace("\n", "\\n")  # read as a line break by keys for text
        return f"{self.key}={text}"


@dataclass(slots=True)
class Port:
    """The overrides, and remarks on settings that have none."""

    lines: dict[str, OverrideLine] = field(default_factory=dict)
    """The overrides by key."""
    missing: list[str] = field(default_factory=list)
    """Settings without a counterpart."""
    nothing: list[str] = field(default_factory=list)
    """Settings with nothing to set."""
    notes: list[str] = field(default_factory=list)
    """What the reader checks or sets."""
    named: set[str] = field(default_factory=set)
    """The settings that overrides are from."""
    remarked: set[str] = field(default_factory=set)
    """The settings of the remarks."""

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Add an override; one of the same key is replaced. names: the settings it is from. note: a remark on it."""
        self.named |= {*names}
        self.lines.pop(key, None)
        self.lines[key] = OverrideLine(key, value, names, note)

    def value(self, key: str) -> Any:
        return self.lines[key].value if key in self.lines else None

    def lack(self, name: str, value: Any, reason: str) -> None:
        self._remark(self.missing, name, value, reason)

    def skip(self, name: str, value: Any, reason: str) -> None:
        self._remark(self.nothing, name, value, reason)

    def check(self, name: str, value: Any, advice: str) -> None:
        self._remark(self.notes, name, value, advice)

    def _remark(self, remarks: list[str], name: str, value: Any, text: str) -> None:
        self.remarked.add(name)
        remarks.append(f"{name}={short(value)}: {text}")

    def carry(self, name: str, value: Any, here: Equivalent | None) -> None:
        """Translate a setting by its row of the table of foreign names, unless an override or remark names it."""
        if name in self.remarked or (name in self.named and not isinstance(value, Unread)):
            return
        if here is None:
            self.check(name, value, UNKNOWN)
        elif here.needless:
            self.skip(name, value, here.needless)
        elif here.lacks and (value == here.default or value in (None, False, "", 0)):
            self.skip(name, value, "it is off, or the default of the other trainer")
        elif here.lacks:
            self.lack(name, value, here.lacks)
        elif isinstance(value, Unread):
            keys = here.here.replace("{}", "VALUE")
            self.check(name, value, f"it is not a literal; {f'set {keys} yourself' if keys else here.note}")
        elif value is None and here.default in (None, UNSTATED):
            self.skip(name, value, "it is not set")
        else:
            self._carry_overrides(name, value, here)

    def _carry_overrides(self, name: str, value: Any, here: Equivalent) -> None:
        templates = here.values.get(str(value).lower(), here.here).split()
        if not templates:
            off = value in (None, False, "") or str(value).lower() in here.values
            needless = value == here.default or (off and not here.here)
            (self.skip if needless else self.check)(name, value, here.note or "it is off")
            return
        if "reward=[model]" in templates and self.value("reward") is not None:
            self.check(name, value, f"add model to reward=[...], and {here.here.split()[1].format(value)}")
            return
        written = dict(template.split("=", 1) for template in templates)
        if self.value("engine") == "vllm_colocate":
            absent = [key for key in written if key.startswith("engine.") and key.split(".")[1] not in COLOCATED]
            if absent:
                off = value == here.default or value in (None, 1)
                reason = f"engine=vllm_colocate has no {absent[0].removeprefix('engine.')}"
                (self.skip if off else self.lack)(name, value, f"{reason}{'' if off else '; engine=vllm has it'}")
                return
        if new := {key: text for key, text in written.items() if key not in self.lines}:
            note = here.note if value != here.default else ""
            for key, text in new.items():
                self.set(key, value if text == "{}" else yaml.safe_load(text.format(value)), name, note=note)
        else:
            chosen = ", ".join(f"{key}={short(self.value(key))}" for key in written)
            self.skip(name, value, f"{chosen} is chosen already")


def number_of(value: Any) -> float | None:
    """A value as a number, also of text such as YAML's `1e-6`; None if it is not a finite one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def with_numbers(settings: Mapping[str, Any], defaults: Mapping[str, Any], port: Port) -> dict[str, Any]:
    """The literal settings, with text such as `1e-6` as a number where the default is one.

    What is not a number there is left out, with a remark.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        default = defaults.get(name)
        numeric = isinstance(default, int | float) and not isinstance(default, bool)
        if isinstance(value, Unread):
            continue
        if not numeric or value is None:
            found[name] = value
        elif (number := number_of(value)) is None:
            port.check(name, value, "it is not a finite number, and is left out")
        else:
            found[name] = number if isinstance(value, str) else value
    return found


def short(value: Any) -> str:
    """A value as text of at most 80 characters on one line."""
    return shorten(one_line(str(value)), 80)


def recipe(port: Port, origin: str) -> str:
    """The overrides as a recipe: choices in the defaults list, and keys as nested mappings."""
    groups = [line for line in port.lines.values() if "." not in line.key and line.key != "seed"]
    values: dict[str, Any] = {}
    for line in port.lines.values():
        if line not in groups:
            *sections, last = line.key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = line.value
    chosen = [{f"override /{line.key}": line.value} for line in sorted(groups, key=lambda line: line.key)]
    text: str = yaml.safe_dump({"defaults": [*chosen, "_self_"], **values}, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# From {clean(origin)}, by grpocli from-trl.\n{text}"


def shell_script(port: Port) -> str:
    """The command as a script for bash: an override and a comment a line, then what to check.

    The last comment is a command that tries the data and the rewards, without the model and without sampling.
    """
    rows = [(shlex.quote(line.override), one_line(line.comment)) for line in port.lines.values()]
    width = min(max(len(override) for override, _ in rows), 60)
    body = [f"  {override:<{width}}{f'  # {comment}' if comment else ''}".rstrip() for override, comment in rows]
    remarks = {"no counterpart": port.missing, "nothing to set": port.nothing, "check": port.notes}
    comments = [f"# {kind}: {one_line(text)}" for kind, texts in remarks.items() for text in texts]
    own = [line.override for line in port.lines.values() if line.key.split(".")[0] in ("task", "reward")]
    if MISSING not in (port.value("task"), port.value("reward")):
        words = [*own, "engine=fake", "train.steps=2", "eval.problems=0", "rollout.max_prompt_tokens=4096"]
        comments.append(f"# try the data and rewards first: grpocli train {shlex.join(words)}")
    return clean("\n".join(["overrides=(", *body, ")", 'grpocli train "${overrides[@]}"', *comments]) + "\n")


MARKS = ("compute_environment", "distributed_type", "deepspeed_config", "fsdp_config", "mixed_precision")
"""Keys that only a config of accelerate has."""
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""model.dtype by its name in accelerate and TRL."""


def is_accelerate(values: Mapping[str, Any]) -> bool:
    return any(name in values for name in MARKS)


def add_accelerate(port: Port, values: dict[str, Any]) -> None:
    inner = {} | (values.get("deepspeed_config") or {}) | (values.get("fsdp_config") or {})
    for name, value in (values | inner).items():
        if here := ACCELERATE.get(name):
            port.carry(name, value, here)
