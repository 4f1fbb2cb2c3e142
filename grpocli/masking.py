"""Secrets that a config names are not shown: errors, logs and summaries are what people send with a report."""

from __future__ import annotations

SHORTEST = 6
"""Characters of a value that is masked: shorter ones occur in other words."""
_shown: dict[str, str] = {}


def mask(value: str, shown: str) -> None:
    """From now on `masked` replaces a value."""
    if len(value) >= SHORTEST:
        _shown[value] = shown


def masked(text: str) -> str:
    """A text with `shown` in place of each value."""
    for value in sorted(_shown, key=len, reverse=True):
        text = text.replace(value, _shown[value])
    return text
