"""`grpocli explain`: print the objective of a run as mathematics; `A vs B` compares two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parse
from grpocli_tools.explain.keys import GroupReference, KeyReference, ReferenceIndex, spelled
from grpocli_tools.explain.render import table
from grpocli_tools.options import parser_of
from grpocli_tools.porting.foreign_names import ALIASES, LORA_CONFIG, TRAINER, TRAINERS, UNSTATED, Equivalent

if TYPE_CHECKING:
    from grpocli_tools.explain.explanation import Explanation
    from grpocli_tools.explain.keys import ReferenceIndex


def main(argv: Sequence[str]) -> int:
    args = parse(parser_of("explain", __doc__), argv)
    keys = [word for word in args.overrides if _is_key(word)]
    if args.from_trl is not None or (keys and len(keys) == len(args.overrides)):
        reference = _reference()
        if args.from_trl is None:
            return _print([entry(reference.find(key)) for key in keys], args)
        words = [args.from_trl, *args.overrides]
        return _print([one for word in words for one in foreign_entries(word, reference)], args)
    if args.json:
        raise ConfigError("is for keys and names", key="--json", hint="grpocli explain train.minibatches --json")
    if known := [key for key in keys if _reference().has(key)]:
        hint = f"write `grpocli explain {known[0]}`, or overrides alone for an objective"
        raise ConfigError("a key cannot stand beside overrides", key=known[0], hint=hint)
    sides = _sides(args.overrides)
    shown = [_explained(side, args.config_dir) for side in sides]
    from grpocli_tools.explain.explanation import compared
    from grpocli_tools.explain.render import (
        comparison_markdown,
        comparison_text,
        explanation_markdown,
        explanation_text,
    )

    if len(shown) == 1:
        print((explanation_markdown if args.markdown else explanation_text)(shown[0]), end="")
    else:
        print((comparison_markdown if args.markdown else comparison_text)(compared(*shown)), end="")
    return 0


def _is_key(word: str) -> bool:
    """Whether a word names a key rather than overrides a value: `train.steps`, but not `~reward.math` or `vs`."""
    return "=" not in word and not word.startswith("~") and word != "vs"


def _reference() -> ReferenceIndex:
    from grpocli.composition.compose import register_parts
    from grpocli.composition.hydra_sources import conf_dir
    from grpocli_tools.explain.keys import ReferenceIndex

    register_parts()
    return ReferenceIndex(Path(conf_dir()))


def _print(entries: Sequence[Entry], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([one.as_json() for one in entries], indent=2, ensure_ascii=False))
    else:
        print("\n".join(one.markdown() if args.markdown else one.text() for one in entries), end="")
    return 0


def _sides(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of one config, or of two that `vs` separates."""
    sides: list[list[str]] = [[]]
    for word in overrides:
        if word == "vs":
            sides.append([])
        else:
            sides[-1].append(word)
    if len(sides) > 2:
        raise ConfigError(f"compares two configs, not {len(sides)}", key="vs")
    return sides


def _explained(overrides: list[str], config_dir: str | None) -> Explanation:
    from grpocli.composition.compose import build_run
    from grpocli_tools.explain.explanation import explanation

    config = composed(overrides, config_dir)
    return explanation(build_run(config), config, overrides)


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
        labels = ["" if label == before else label for before, label in pairwise(["", *(one for one, _ in self.rows)])]
        facts = [f"  {label:<{LABEL}}{value}" for label, (_, value) in zip(labels, self.rows, strict=True)]
        lines = [self.name, *([f"  {self.meaning}"] if self.meaning else []), *facts]
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
