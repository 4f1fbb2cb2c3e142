"""Finds the program in a text of Markdown, LaTeX or tags."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
from contextlib import suppress

BLOCK = re.compile(
    r"^(?P<indent>[ \t>]*+(?:(?:[-*+]|\d+[.)])[ \t]+)?+)"
    r"(?:(?:[^\n`~]|(?<!`)`{1,2}(?!`))*[^\n`~\w](?=`+(?:[Pp]y(?:thon)?3?)?[ \t\r]*\n))?"  # words before the fence
    r"(?P<fence>`{3,}|~{3,})[^\w\n`~]*(?P<language>\w*)[^\n`]*\n"
    r"(?P<code>.*?)(?:(?:^[ \t>]*|(?<=[^\s`])(?=`+[ \t\r]*$))(?P=fence)[`~]*(?P<closed>(?![\w`~]))|\Z)",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(
    r"^[ \t]*(?:(?P<begin>\[(?:PYTHON|BEGIN)\]|\\begin\{(?:code|python|lstlisting|minted|verbatim)\}[^\n]*"
    r"|(?:<pre>)?<(?:code|python)\b[^>\n]*>)|\[(?:/PYTHON|DONE)\]|\\end\{\w+\}|</(?:code|python)>(?:</pre>)?)",
    re.MULTILINE,
)
"""What prompts of MBPP and DS-1000, and pages of LaTeX and HTML, put around a program instead of a fence."""
PYTHON = ("python", "python3", "py", "py3")
READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0")
"""What a script does that has an input."""
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
DEFINED = re.compile(r"^(?:(?:async +)?def +|class +|(?=\w+ *=))(\w+)", re.MULTILINE)


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the code of each block that has code, without its indent.

    A block that is not closed counts if it is the only one.
    """
    text = MARK.sub(lambda mark: "```python\n" if mark["begin"] else "```\n", text) if not BLOCK.search(text) else text
    found = [one for one in BLOCK.finditer(text) if one["code"].strip()]
    if len(found) > 1 and found[-1]["closed"] is None:
        found.pop()
    read: list[tuple[str, str]] = []
    for one in found:
        code = _dedent(one["code"], len(one["indent"]))
        mark = MARK.match(code.lstrip())
        read += blocks(code) if mark and mark["begin"] else [(one["language"].lower(), code)]
    return read


def _dedent(code: str, most: int) -> str:
    """The code without its indent, of which a part of a function or of a quote loses only that of the fence."""
    with suppress(*NOT_PYTHON):
        dedented = textwrap.dedent(code)
        compile(dedented, "<program>", "exec", dont_inherit=True)
        return dedented
    return re.sub(rf"(?m)^[ \t>]{{,{most}}}", "", code)


def program(text: str, names: set[str]) -> str | None:
    """The last block of Python that defines one of the names, else the last of Python, of no language, of any.

    Without names it is a script, and the last that reads its input is taken. What it uses and does not define comes
    from the other blocks. None without a block.
    """
    found = blocks(text)

    def fitness(block: tuple[str, str]) -> int:
        language, code = block
        fits = names.intersection(DEFINED.findall(code)) if names else READS.search(code)
        if fits and language in ("", *PYTHON):
            return 3
        return 2 if language in PYTHON else 1 if not language else 0

    if not found:
        return None
    best = max(reversed(found), key=fitness)
    others = [code for language, code in found if language in ("", *PYTHON) and code != best[1]]
    return _definitions(best[1], others) + best[1]


def _definitions(code: str, others: list[str]) -> str:
    """The statements of other blocks that define what the code uses and does not define."""
    defined, needed = symbols(code)
    defined |= {*dir(builtins)}  # an example may say input = ...
    taken = ""
    for other in reversed(others):
        with suppress(*NOT_PYTHON):
            for one in map(ast.unparse, reversed(ast.parse(other).body)):
                own, used = symbols(one)
                if own & (needed - defined) or " import *" in one:
                    taken = f"{one}\n{taken}"
                    needed |= used  # a helper's helper
    return taken


def symbols(code: str) -> tuple[set[str], set[str]]:
    """The names that a module of this code defines, and the global names that it uses. Empty if it is not Python."""
    with suppress(*NOT_PYTHON):
        tables = [symtable.symtable(code, "<program>", "exec")]
        for table in tables:
            tables += table.get_children()
        defined = {one.get_name() for one in tables[0].get_symbols() if one.is_assigned() or one.is_imported()}
        used = {one for table in tables for one in table.get_symbols() if one.is_global() and one.is_referenced()}
        return defined, {one.get_name() for one in used}
    return set(), set()
