"""Masking the secrets of a config in errors, logs and summaries, which users may publish."""

from __future__ import annotations

import re

CREDENTIALS = re.compile(r"//(?P<secret>[^/@\s]*)@")
"""Matches the user and the password of an address."""
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


def without_secrets(url: str) -> str:
    """An address without a password in it, and without the parameters that sign it."""
    return CREDENTIALS.sub("//", url).partition("?")[0]
