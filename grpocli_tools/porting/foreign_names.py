"""What grpocli has in place of names of TRL, NeMo RL, verl and transformers: the hook `foreign_names`.

The tables are the YAML files beside this one; trl.yaml says what its columns are. Errors of the command line, `grpocli
explain KEY`, `grpocli from-trl` and docs/from-trl.md read them. Tests compose every override, and compare fields and
defaults of TRL with an installed TRL.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from grpocli.config.yaml_text import LOADER

UNSTATED: Final = object()
"""Marks a foreign name whose default is not stated."""


@dataclass(frozen=True, slots=True)
class Equivalent:
    """What grpocli has in place of a foreign name."""

    here: str = ""
    """Overrides, in which `{}` is the value; empty if there is nothing to set."""
    values: Mapping[str, str] = field(default_factory=dict)
    """{value in lower case: overrides for it}."""
    note: str = ""
    """A remark on the overrides, or what to do."""
    needless: str = ""
    """Why nothing has to be set."""
    lacks: str = ""
    """Why grpocli has no counterpart, or what to do instead."""
    default: Any = UNSTATED
    """The default of the other trainer."""
    why: str = ""
    """Why the default here differs; empty if it does not."""

    @property
    def remark(self) -> str:
        """The sentence beside the overrides."""
        if self.lacks:
            return f"no counterpart: {self.lacks}"
        return f"nothing to set: {self.needless}" if self.needless else self.note

    def sentence(self, value: str) -> str:
        """The advice for a value, such as `write optim.lr=1e-6`."""
        written = " ".join(shlex.quote(one) for one in self.written(value))
        return "; ".join(filter(None, [f"write {written}" if written else "", self.remark]))

    def written(self, value: str) -> list[str]:
        """The overrides for a value."""
        overrides = self.values.get(value.strip("'\"").lower(), self.here)
        return [one.format(value) for one in overrides.split()]

    def examples(self) -> Iterator[str]:
        yield from filter(None, [self.here, *self.values.values()])

    @property
    def keys(self) -> list[str]:
        """The keys that get the value; without any, all keys that are set."""
        given = [one.partition("=")[0] for one in self.here.split() if "{}" in one]
        chosen = [one.partition("=")[0] for text in self.examples() for one in text.split()]
        return list(dict.fromkeys(given or chosen))


SHARED = ("here", "values", "note", "needless", "lacks")
"""The columns that a row takes over from the one that it is `like`."""
Table = dict[str, Equivalent]


def _tables(*names: str) -> Iterator[tuple[str, Table]]:
    """(section, its rows) of the files. `like` names a row of the section, or of any section before it."""
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        for section, written in yaml.load(text, LOADER).items():
            table: Table = {}
            for foreign, row in written.items():
                row = {"here": row} if isinstance(row, str) else dict(row)
                like = {key: value for key, value in rows.get(row.pop("like", ""), {}).items() if key in SHARED}
                rows[foreign] = like | row
                table[foreign] = Equivalent(**rows[foreign])
            yield section, table


_NAMES = dict(_tables("trl.yaml", "nemo_rl.yaml", "verl.yaml"))
GRPO_CONFIG, TRAINING_ARGUMENTS, MODEL_CONFIG = (
    _NAMES[name] for name in ("GRPOConfig", "TrainingArguments", "ModelConfig")
)
TRAINER, LORA_CONFIG, EARLIER = _NAMES["GRPOTrainer"], _NAMES["LoraConfig"], _NAMES["earlier"]
NEMO_RL, VERL = _NAMES["NeMo RL"], _NAMES["verl"]
TRL = GRPO_CONFIG | TRAINING_ARGUMENTS | MODEL_CONFIG
ALIASES = EARLIER | _NAMES["others"]
"""Names of earlier versions, and others that people type."""
CHOICES = dict(_tables("choices.yaml"))
ACCELERATE = dict(_tables("accelerate.yaml"))["accelerate"]
TRAINERS = {"TRL": TRL, "NeMo RL": NEMO_RL, "verl": VERL}
TRANSLATION = yaml.load(Path(__file__).with_name("translation.yaml").read_text(encoding="utf-8"), LOADER)
SHARED_NAMES = ("seed", "optim", "model")
"""Foreign names that are also keys or config groups of grpocli."""
KEYS = {name: here for name, here in (ALIASES | TRL | NEMO_RL | VERL).items() if name not in SHARED_NAMES}


def key_advice(key: str, value: str) -> str | None:
    """The advice for a key of another trainer; None for an unknown key."""
    here = KEYS.get(key)
    return here.sentence(value) if here else None


def advice_of_like(name: str, value: str) -> str | None:
    """The advice for the key of another trainer that is written almost as `name`; None if there is none."""
    close = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.85)
    return key_advice(close[0], value) if close else None


def choice_advice(group: str, choice: str) -> str | None:
    """The advice for a choice of another trainer; None for an unknown choice."""
    here = CHOICES.get(group, {}).get(choice.lower().replace("-", "_"))
    return here.sentence(choice) if here else None


def without_effect(name: str, value_of: Callable[[str], Any]) -> str:
    """Why a setting of TRL has no effect beside the others, as translation.yaml says; "" if it has one."""
    for one in TRANSLATION["needs"]:
        value = value_of(one["setting"])
        is_off = value not in one["values"] if "values" in one else not value
        if name.startswith(tuple(one["names"])) and name != one["setting"] and is_off:
            return f"it has no effect with {one['setting']}={value}"
    return ""
