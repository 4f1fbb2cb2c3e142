"""Quoting of texts with commas, braces or quotes, for Hydra and the shell."""

from __future__ import annotations

import shlex

from hydra.core.override_parser.types import Quote, QuotedString


def quoted(key: str, value: str) -> str:
    """An override of a text, with quotes for Hydra inside the shell's: `'KEY="VALUE"'`."""
    return shlex.quote(f"{key}={_hydras(value)}")


def quoted_list(key: str, value: str) -> str:
    """An override of a list of texts: `'KEY=["A","B"]'`."""
    texts = [text.strip().strip("'\"") for text in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return shlex.quote(f"{key}=[{','.join(_hydras(text) for text in texts if text)}]")


def _hydras(text: str) -> str:
    shown = text.replace("\n", r"\n").replace("\t", r"\t")  # as they are typed in text keys
    quotes: str = QuotedString(shown, Quote.double).with_quotes()
    return quotes
