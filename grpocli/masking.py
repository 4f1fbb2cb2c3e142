"""Masking the secrets of a config in errors, logs and summaries, which users may publish."""

from __future__ import annotations

SHORTEST = 6
"""The shortest value that is masked, in characters: shorter ones occur in other words."""
_shown: dict[str, str] = {}


def mask(value: str, shown: str) -> None:
    """Have `masked` replace a value by `shown` from now on."""
    if len(value) >= SHORTEST:
        _shown[value] = shown


def masked(text: str) -> str:
    """A text in which each masked value is replaced."""
    for value in sorted(_shown, key=len, reverse=True):
        text = text.replace(value, _shown[value])
    return text
