"""An override as Hydra reads it, texts as Hydra writes them, and the escapes of a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer
from hydra.errors import HydraException

from grpocli.config.build import Leaf, leaves

PLAIN = re.compile(r"[\w/.:+-]+|\?\?\?", re.ASCII)
"""Texts that Hydra reads without quotes, unless it reads something else than a text."""


def parse(override: str) -> Override | None:
    """The override as Hydra reads it; None if it cannot."""
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def leaves_of(override: Override) -> Iterator[Leaf]:
    """The plain values that an override sets, with their keys."""
    return leaves(override.value(), (override.package or override.key_or_group).replace("/", "."))


def plain(value: Any) -> Any:
    """A text without its quotes; other values unchanged."""
    return value.text if isinstance(value, QuotedString) else value


def texts_of(override: str) -> list[str]:
    """The texts of an override's list, or its only text, without quotes; as typed if Hydra reads something else."""
    found = parse(override)
    value = found._value if found else None
    texts = [plain(one) for one in (value if isinstance(value, list) else [value])]
    return texts if all(isinstance(one, str) for one in texts) else [override.partition("=")[2]]


def text_of(override: str) -> str:
    """The only text of an override, or the first of its list; `[]` for an empty one."""
    return next(iter(texts_of(override)), "[]")


def in_quotes(text: str, quote: Quote = Quote.single) -> str:
    """A text with the quotes of Hydra's syntax."""
    quoted: str = QuotedString(text, quote).with_quotes()
    return quoted


def to_text(value: Any, quote: Quote = Quote.single) -> str:
    """A value in Hydra's syntax, with quotes around a text that needs them."""
    if isinstance(value, list | tuple):
        return f"[{','.join(to_text(one, quote) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{to_text(key, quote)}:{to_text(one, quote)}' for key, one in value.items())}}}"
    if isinstance(value, int | float | QuotedString | None):
        return str(value).lower() if isinstance(value, bool) else str(Transformer.str(value))
    text = str(value)
    found = parse(f"+key={text}") if PLAIN.fullmatch(text) else None
    return text if found and found._value == text else in_quotes(text, quote)  # 5 and null are no texts


LATEX = re.compile(
    r"nabla|natural|ncong|ne|nearrow|neg|neq|newcommand|newline|nexists|ngeq|nleq|nmid|noindent|"
    r"nonumber|normalsize|not|notag|notin|nparallel|nsubseteq|nu|nwarrow|tag|tan|tanh|tau|tbinom|"
    r"text|textbf|textit|textrm|textsc|textsf|textstyle|texttt|tfrac|therefore|theta|thickapprox|"
    r"tilde|times|tiny|to|top|triangle|triangleq|tt"
)
"""LaTeX commands that begin like an escape; prompts often have them."""
ESCAPE = re.compile(r"\\(\\)(?=[nt])|\\([nt][A-Za-z]*(?:\.[A-Za-z])?)")
"""A letter after a full stop is part of the word: `\\ne.g.` is a line break and `e.g.`, not LaTeX's `\\ne`."""
CHARACTERS = {"n": "\n", "t": "\t"}


def unescape(text: str) -> str:
    r"""`\n` as a line break, `\t` as a tab, `\\n` as a backslash and an n; everything else unchanged.

    LaTeX commands (`\neq`, `\text`) and all other backslashes (`\boxed`, `\frac`, `\\`, `\d`) stay.
    """
    return ESCAPE.sub(lambda found: found[1] or _character(found[2]) or found[0], text)


def _character(word: str) -> str:
    return "" if LATEX.fullmatch(word) else CHARACTERS[word[0]] + word[1:]
