"""Escapes for line breaks and tabs in texts on a command line: `rollout.stop=["\\n\\n"]`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omegaconf import DictConfig, ListConfig, OmegaConf

from grpocli.config.parts import ESCAPED, is_marked

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


def literal_escapes(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Warnings for texts with a literal backslash-n or backslash-t, as from a YAML without double quotes."""
    for name in map(str, config):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name):
            continue
        value = config[name]
        if isinstance(value, DictConfig):
            yield from literal_escapes(value, f"{key}.")
        elif is_marked(key, ESCAPED):
            texts = value if isinstance(value, ListConfig) else [value]
            if found := [word for text in texts if isinstance(text, str) for word in _literal(text)]:
                yield (
                    f"{key} has a backslash and the letter {found[0][1]} in {found[0]}, not a line break or a tab; "
                    "in a YAML these need double quotes"
                )


def _literal(text: str) -> list[str]:
    return [found[0] for found in ESCAPE.finditer(text) if found[2] and not LATEX.fullmatch(found[2])]
