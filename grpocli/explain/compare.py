"""What differs between two objectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpocli.explain.compose import ORDER, Explanation, Section
from grpocli.explain.layout import LABEL, wrapped

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Pair:
    """One step of the computation on both sides, where they differ; None where a side has none."""

    label: str
    left: Section | None
    right: Section | None

    def lines(self) -> Iterator[str]:
        """The left side's formulas above the right side's, without what both say."""
        yield self.label
        left, right = _said(self.left), _said(self.right)
        for side, mine, theirs in (("left", left, right), ("right", right, left)):
            name = f"  {side}"
            for text in [text for text in mine if text not in theirs] or [ABSENT]:
                for line in wrapped(text):
                    yield f"{name:<{LABEL}} {line}"
                    name = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """titles: both command lines. sections: the steps that differ. keys: [key, left, right] where values differ."""

    titles: tuple[str, str]
    sections: tuple[Pair, ...]
    keys: list[list[str]]

    @property
    def same(self) -> bool:
        return not self.sections and not self.keys

    @property
    def verdict(self) -> str:
        """A sentence where there is little to see."""
        if self.same:
            return "the same objective"
        return "" if self.sections else "the same formulas; these values differ"


def compared(left: Explanation, right: Explanation) -> Comparison:
    """The steps whose formulas differ and the keys whose values differ, in the order of the computation."""
    keys = [
        [key, left.values.get(key, ABSENT), right.values.get(key, ABSENT)]
        for key in dict.fromkeys((*left.values, *right.values))
        if left.values.get(key) != right.values.get(key)
    ]
    titles = (f"left   {left.title or '(the defaults)'}", f"right  {right.title or '(the defaults)'}")
    return Comparison(titles, tuple(_pairs(left, right)), keys)


def _pairs(left: Explanation, right: Explanation) -> Iterator[Pair]:
    mine, theirs = _by_label(left), _by_label(right)
    for label in ORDER:
        a, b = mine.get(label), theirs.get(label)
        if _said(a) != _said(b):
            yield Pair(label, a, b)


def _said(section: Section | None) -> tuple[str, ...]:
    return (*section.lines, section.note) if section else ()


def _by_label(shown: Explanation) -> dict[str, Section]:
    """The sections by name; a part not in use says with its note what stands in the other's place."""
    return {section.label: section for section in (*shown.sections, *shown.unused)}
