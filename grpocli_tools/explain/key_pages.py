"""The reference of a key or group as text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpocli_tools.explain.choice_files import ChoiceFiles, spelled
from grpocli_tools.explain.keys import GroupReference, KeyReference, Variant
from grpocli_tools.explain.render import entry_markdown, entry_text
from grpocli_tools.porting.equivalent import UNSTATED
from grpocli_tools.porting.foreign_names import TRAINERS

LISTED = 8
"""Entries of a long list in the text of the command line; JSON has all."""
Rows = list[tuple[str, str]]


def rows(shown: KeyReference | GroupReference) -> Rows:
    """(label, text) of everything known about a key or group, in the order to print."""
    return _key_rows(shown) if isinstance(shown, KeyReference) else _group_rows(shown)


def _key_rows(key: KeyReference) -> Rows:
    found: Rows = []
    for variant in key.variants:
        found += _variant_rows(variant, several=len(key.variants) > 1)
    found += [("set by", text) for texts in _set_by(key.set_by) for text in texts]
    found += [
        ("class", text) for text in dict.fromkeys(one.reader for one in key.variants if one.owner is not ChoiceFiles)
    ]
    return [*found, *_foreign_rows(key.foreign), ("example", key.example)]


def _variant_rows(variant: Variant, several: bool) -> Iterator[tuple[str, str]]:
    if variant.choices:
        yield "with", _short(variant.choices)
    if several:
        yield "meaning", variant.doc
    yield "type", variant.type
    yield "default", variant.default or "none: it must be given"
    if variant.allowed:
        yield "choices", ", ".join(variant.allowed)


def _group_rows(group: GroupReference) -> Rows:
    found: Rows = [("choice", f"{name}: {doc}") for name, doc in group.choices]
    found += [("default", group.default)] if group.default else []
    others, recipes = _set_by(group.chosen_by)
    found += [("chosen by", text) for text in others] + [("recipes", text) for text in recipes]
    for key in group.keys:
        first = key.variants[0]
        found.append(("key", f"{key.name}={first.default}: {first.doc.split('. ')[0].rstrip('.')}."))
    return [*found, *_foreign_rows(group.foreign), ("example", group.example)]


def _set_by(entries: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """`algorithm=dapo: 0.28` and others; the recipes in one line, if there are any."""
    lines = [f"{label}: {value}" for label, value in entries if not label.startswith("recipe=")]
    recipes = [f"{label} ({value})" for label, value in entries if label.startswith("recipe=")]
    return lines, [_short(recipes)] if recipes else []


def _short(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _foreign_rows(foreign: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    for trainer, names in foreign.items():
        table = TRAINERS[trainer]
        stated = {name: table[name].default for name in names}
        shown = [name if value is UNSTATED else f"{name} (default {spelled(value)})" for name, value in stated.items()]
        yield trainer, ", ".join(shown)


def text(shown: KeyReference | GroupReference) -> str:
    """For a terminal: the name, the meaning, and a line for each fact."""
    return entry_text(shown.name, _meaning(shown), rows(shown))


def markdown(shown: KeyReference | GroupReference) -> str:
    """A heading, the meaning and a table."""
    return entry_markdown(shown.name, _meaning(shown), rows(shown))


def _meaning(shown: KeyReference | GroupReference) -> str:
    if isinstance(shown, GroupReference):
        return shown.doc
    return shown.variants[0].doc if len(shown.variants) == 1 else ""


def as_json(shown: KeyReference | GroupReference) -> dict[str, Any]:
    """The same as plain values."""
    common = {"name": shown.name, "foreign": {k: list(v) for k, v in shown.foreign.items()}, "example": shown.example}
    if isinstance(shown, GroupReference):
        return common | {
            "meaning": shown.doc,
            "choices": dict(shown.choices),
            "default": shown.default,
            "chosen_by": dict(shown.chosen_by),
            "keys": [key.name for key in shown.keys],
        }
    return common | {
        "variants": [
            {
                "choices_with_it": list(one.choices),
                "meaning": one.doc,
                "type": one.type,
                "default": one.default or None,
                "allowed": list(one.allowed),
                "class": f"{one.owner.__module__}.{one.owner.__qualname__}",
            }
            for one in shown.variants
        ],
        "set_by": [list(entry) for entry in shown.set_by],
    }
