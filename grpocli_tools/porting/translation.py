"""The result of a translation: overrides, settings without a counterpart, and what a reader must check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml
from hydra.core.override_parser.types import Quote

from grpocli.composition.overrides import to_text
from grpocli.text import clean
from grpocli_tools.porting.equivalent import UNSTATED, Equivalent
from grpocli_tools.porting.source import Unread, number_of

COLOCATED = (
    "gpu_memory_utilization",
    "cpu_kv_cache_gb",
    "max_model_len",
    "enforce_eager",
    "quantization",
    "sleep",
    "vllm_args",
)
"""Keys of engine=vllm_colocate."""
MISSING = "???"
"""The value of a choice that the reader must make: a command with it does not train."""


@dataclass(frozen=True, slots=True)
class OverrideLine:
    """An override. names: the settings it is from. note: a remark on it."""

    key: str
    value: Any
    names: tuple[str, ...] = ()
    note: str = ""

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
    """The overrides, and remarks on settings that have none. named: settings that overrides are from.

    missing: without a counterpart. nothing: with nothing to set. notes: to be checked or set by the reader.
    remarked: the settings of these remarks.
    """

    lines: list[OverrideLine] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    remarked: set[str] = field(default_factory=set)

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Add an override; one of the same key is replaced. names: the settings it is from. note: a remark on it."""
        self.named |= set(names)
        self.lines = [line for line in self.lines if line.key != key]
        self.lines.append(OverrideLine(key, value, names, note))

    def value(self, key: str) -> Any:
        """The value of a key; None without an override."""
        return next((line.value for line in self.lines if line.key == key), None)

    def lack(self, name: str, value: Any, reason: str) -> None:
        self._remark(self.missing, name, value, reason)

    def skip(self, name: str, value: Any, reason: str) -> None:
        self._remark(self.nothing, name, value, reason)

    def check(self, name: str, value: Any, advice: str) -> None:
        self._remark(self.notes, name, value, advice)

    def _remark(self, remarks: list[str], name: str, value: Any, text: str) -> None:
        self.remarked.add(name)
        remarks.append(f"{name}={shortened(value)}: {text}")

    def carry(self, name: str, value: Any, here: Equivalent | None) -> None:
        """Translate a setting by its row of the table of foreign names, unless an override or remark names it."""
        if name in self.remarked or (name in self.named and not isinstance(value, Unread)):
            return
        if here is None:
            self.check(name, value, "grpocli does not know this setting; set its equivalent yourself, or leave it out")
        elif isinstance(value, Unread) and not here.lacks and not here.note.startswith("nothing to set: "):
            keys = here.overrides.replace("{}", "VALUE")
            self.check(name, value, f"it is not a literal; {f'set {keys} yourself' if keys else here.note}")
        elif here.lacks and (value == here.default or value in (None, False, "", 0)):
            self.skip(name, value, "it is off, or the default of the other trainer")
        elif here.lacks:
            self.lack(name, value, here.note.removeprefix("no counterpart: "))
        elif here.note.startswith("nothing to set: "):
            self.skip(name, value, here.note.removeprefix("nothing to set: "))
        elif value is None and here.default in (None, UNSTATED):
            self.skip(name, value, "it is not set")
        else:
            self._carry_overrides(name, value, here)

    def _engine_has(self, key: str) -> bool:
        return self.value("engine") != "vllm_colocate" or key.split(".")[1] in COLOCATED

    def _without_engine_key(self, name: str, value: Any, key: str, here: Equivalent) -> None:
        if value == here.default or value in (None, 1):
            self.skip(name, value, f"engine=vllm_colocate has no {key.removeprefix('engine.')}, and needs none")
        else:
            self.lack(name, value, f"engine=vllm_colocate has no {key.removeprefix('engine.')}; engine=vllm has it")

    def _carry_overrides(self, name: str, value: Any, here: Equivalent) -> None:
        templates = here.values.get(str(value).lower(), here.overrides).split()
        if not templates:
            off = value in (None, False, "") or str(value).lower() in here.values
            needless = value == here.default or (off and not here.overrides)
            (self.skip if needless else self.check)(name, value, here.note or "it is off")
            return
        if "reward=[model]" in templates and self.value("reward") is not None:
            self.check(name, value, f"add model to reward=[...], and {here.overrides.split()[1].format(value)}")
            return
        note = here.note if value != here.default else ""
        added = 0
        for template in templates:
            key, _, text = template.partition("=")
            if key.startswith("engine.") and not self._engine_has(key):
                self._without_engine_key(name, value, key, here)
                return
            if self.value(key) is None:
                self.set(key, value if text == "{}" else yaml.safe_load(text.format(value)), name, note=note)
                added += 1
        if not added:
            keys = dict.fromkeys(template.partition("=")[0] for template in templates)
            chosen = ", ".join(f"{key}={shortened(self.value(key))}" for key in keys)
            self.skip(name, value, f"{chosen} is chosen already")


class Numbers:
    """Reads numbers of another trainer's settings. default_text: how a remark names the default of that trainer."""

    port: Port
    default_text: ClassVar[str]

    def get(self, name: str) -> Any:
        """A setting, or its default."""
        raise NotImplementedError

    def default(self, name: str) -> Any:
        raise NotImplementedError

    def number(self, name: str) -> float:
        """A setting as a number, also from text such as YAML's `1e-6`; else the default, with a remark."""
        if (value := number_of(self.get(name))) is not None:
            return value
        default = float(self.default(name) or 0)
        if name not in self.port.remarked:
            self.port.check(name, self.get(name), f"it is not a number; {self.default_text.format(default)} is used")
        return default

    def whole(self, name: str) -> int:
        """A setting as a whole number from 1 on."""
        return max(1, int(self.number(name)))


def shortened(value: Any) -> str:
    """A value as text of at most 80 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def recipe(port: Port, origin: str) -> str:
    """The overrides as a recipe: choices in the defaults list, and keys as nested mappings."""
    groups = [line for line in port.lines if "." not in line.key and line.key != "seed"]
    values: dict[str, Any] = {}
    for line in port.lines:
        if line not in groups:
            *sections, last = line.key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = line.value
    chosen = [{f"override /{line.key}": line.value} for line in sorted(groups, key=lambda line: line.key)]
    text: str = yaml.safe_dump({"defaults": [*chosen, "_self_"], **values}, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n# From {clean(origin)}, by grpocli from-trl.\n{text}"
