"""The same text for a terminal and for a document: sections in two columns, plain Unicode."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from grpocli.explain.compose import Explanation, Section, Symbol

LABEL = 18  # the longest name of a choice, normalize_then_sum
WIDTH = 80


def section_lines(section: Section) -> list[str]:
    """Its name, and below it the choice; beside them the formulas, and below them the note."""
    left = [section.label, *([section.choice] if section.choice else [])]
    right = right_lines(section)
    rows = max(len(left), len(right))
    left += [""] * (rows - len(left))
    right += [""] * (rows - len(right))
    return [f"{a:<{LABEL}} {b}".rstrip() for a, b in zip(left, right, strict=True)]


def right_lines(section: Section) -> list[str]:
    """Formulas as they are, where they fit; sentences wrapped."""
    return [line for text in (*section.lines, section.note) for line in wrapped(text)]


def formula_lines(shown: Explanation) -> list[str]:
    """The whole objective, a blank line between sections."""
    blocks = [section_lines(section) for section in shown.sections]
    return [line for block in blocks for line in (*block, "")][:-1]


def unused_line(unused: Iterable[Section]) -> str:
    """`question_weight uniform: every question weighs 1`, a clause each."""
    said = [f"{s.label} {s.choice} ({s.note.rstrip('.')})" for s in unused]
    return "; ".join(said)


def source_rows(sections: Sequence[Section]) -> list[list[str]]:
    """Where each formula is from."""
    return [[f"{s.label} {s.choice}".strip(), source] for s in sections for source in s.source]


def symbol_rows(symbols: Iterable[Symbol]) -> list[list[str]]:
    return [[s.name, s.key, s.value, s.meaning] for s in symbols]


def settings_line(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{key}={value}" for key, value in pairs)


def wrapped(text: str) -> list[str]:
    """A text in the formulas' column; formulas fit, sentences are wrapped."""
    room = WIDTH - LABEL - 1
    if len(text) <= room:
        return [text] if text else []
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
