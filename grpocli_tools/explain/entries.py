"""What is known about a key, a config group or a foreign name, as text, Markdown and JSON."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli_tools.explain.keys import GroupReference, KeyReference, ReferenceIndex, spelled
from grpocli_tools.explain.render import table
from grpocli_tools.porting.foreign_names import ALIASES, LORA_CONFIG, TRAINER, TRAINERS, UNSTATED, Equivalent

TABLES = {
    "TRL": TRAINERS["TRL"] | {f"GRPOTrainer({name}=)": one for name, one in TRAINER.items()},
    "PEFT": {f"LoraConfig({name}=)": one for name, one in LORA_CONFIG.items()},
    "NeMo RL": TRAINERS["NeMo RL"],
    "verl": TRAINERS["verl"],
    "other names": ALIASES,
}
WIDTH, LABEL = 100, 13
"""The widest text, and the columns of its labels."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name, its meaning and (label, text) of everything else, in the order to print."""

    name: str
    meaning: str
    rows: Sequence[tuple[str, str]]

    def text(self) -> str:
        """For a terminal: a line for each fact."""
        width = min(shutil.get_terminal_size().columns, WIDTH) if sys.stdout.isatty() else WIDTH
        lines = [self.name, *textwrap.wrap(self.meaning, width, initial_indent="  ", subsequent_indent="  ")]
        fill = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
        before, fill.subsequent_indent = "", " " * (LABEL + 4)
        for label, value in self.rows:
            first = f"  {'' if label == before else label:<{LABEL}}"
            fill.initial_indent, before = first, label
            lines += fill.wrap(value) or [first]
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def markdown(self) -> str:
        """A heading, the meaning and a table."""
        meaning = [self.meaning, ""] if self.meaning else []
        return "\n".join([f"### `{self.name}`", "", *meaning, *table(["", ""], self.rows)])

    def as_json(self) -> dict[str, Any]:
        """{"name", "meaning"} and the texts of each label."""
        texts: dict[str, list[str]] = {}
        for label, value in self.rows:
            texts.setdefault(label, []).append(value)
        return {"name": self.name, "meaning": self.meaning, **texts}


def entry(shown: KeyReference | GroupReference) -> Entry:
    """The entry of a key or group."""
    if isinstance(shown, GroupReference):
        return Entry(shown.name, shown.doc, list(_group_rows(shown)))
    meaning = shown.variants[0].doc if len(shown.variants) == 1 else ""
    return Entry(shown.name, meaning, list(_key_rows(shown)))


def _key_rows(key: KeyReference) -> Iterator[tuple[str, str]]:
    for variant in key.variants:
        if variant.choices:
            yield "with", ", ".join(variant.choices)
        if len(key.variants) > 1:
            yield "meaning", variant.doc
        yield "type", variant.type
        yield "default", variant.default or "none: it must be given"
        if variant.allowed:
            yield "choices", ", ".join(variant.allowed)
    yield from _chosen("set by", "set by", key.set_by)
    for reader in dict.fromkeys(one.reader for one in key.variants):
        yield "class", reader
    yield from _foreign(key.foreign)
    yield "example", key.example


def _group_rows(group: GroupReference) -> Iterator[tuple[str, str]]:
    for name, doc in group.choices:
        yield "choice", f"{name}: {doc}"
    if group.default:
        yield "default", group.default
    yield from _chosen("chosen by", "recipes", group.chosen_by)
    for key in group.keys:
        first = key.variants[0]
        yield "key", f"{key.name}={first.default}: {first.doc.split('. ')[0].rstrip('.')}."
    yield from _foreign(group.foreign)
    yield "example", group.example


def _chosen(label: str, of_recipes: str, entries: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """`algorithm=dapo: 0.28` and others; the recipes in one line, if there are any."""
    for choice, value in entries:
        if not choice.startswith("recipe="):
            yield label, f"{choice}: {value}"
    if recipes := [f"{choice} ({value})" for choice, value in entries if choice.startswith("recipe=")]:
        yield of_recipes, ", ".join(recipes)


def _foreign(foreign: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    for trainer, names in foreign.items():
        defaults = {name: default_there(TRAINERS[trainer][name]) for name in names}
        yield trainer, ", ".join(f"{name} (default {one})" if one else name for name, one in defaults.items())


def default_there(equivalent: Equivalent) -> str:
    """The default of the other trainer; "" if it is not stated."""
    return "" if equivalent.default is UNSTATED else spelled(equivalent.default)


def foreign_entries(word: str, reference: ReferenceIndex) -> list[Entry]:
    """The entries of the foreign names that are a word, or end in it. A word may be NAME=VALUE.

    Raises ConfigError for an unknown name.
    """
    name, equals, value = word.strip().lstrip("-+").partition("=")
    plain = name.replace("-", "_")
    every = [(trainer, known) for trainer, names in TABLES.items() for known in names]
    exact = [(trainer, known) for trainer, known in every if plain and (plain == known or f"({plain}=)" in known)]
    found = exact or [(trainer, known) for trainer, known in every if known.endswith(f".{plain}")]
    if not found:
        if reference.has(name):
            raise ConfigError("is a key of grpocli", key=name, hint=f"grpocli explain {name}")
        close = nearest(plain, [known for _, known in every])
        raise ConfigError(f"no name of TRL, NeMo RL or verl is called {name or '(nothing)'}{close}", key="--from-trl")
    return [
        Entry(
            f"{known}={value}" if equals else known,
            "",
            list(_foreign_rows(trainer, TABLES[trainer][known], value if equals else None, reference)),
        )
        for trainer, known in found
    ]


def _foreign_rows(
    trainer: str, equivalent: Equivalent, value: str | None, reference: ReferenceIndex
) -> Iterator[tuple[str, str]]:
    yield "of", trainer
    if default := default_there(equivalent):
        yield "default", default
    yield "here", " ".join(equivalent.written("VALUE" if value is None else value)) or "-"
    for key in equivalent.keys:
        if (ours := reference.default_of(key)) is not None:
            yield "default here", f"{key}={ours}"
    if equivalent.why:
        yield "difference", equivalent.why
    for one, overrides in equivalent.values.items() if value is None else ():
        yield f"={one}", overrides or "-"
    if equivalent.remark:
        yield "note", equivalent.remark
