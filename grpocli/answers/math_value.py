"""Reads an answer of `math`: its members, the sides of its equations, its numbers and expressions.

Only worker processes import this module, since math-verify takes seconds and memory.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import latex2sympy2 as parser  # type: ignore[import-untyped]
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Expr, Integer, MatrixBase, Mul, Pow, Rational, Symbol, oo
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

from grpocli.answers.final_answer import CHANGES, DIGIT, depths
from grpocli.answers.math_text import THOUSANDS, Quantity, bare, canonical, encloses, plain_number, quantity, separate

LARGEST_DIGITS = 10_000
"""Most digits of a number that is computed."""
MOST_TERMS = 1000
"""Most terms of a sum or product that is computed term by term."""
DEEPEST = 12
"""Most levels of nested brackets that are parsed."""
DIGITS = 50
"""Digits of irrational numbers."""
NORMAL = parser.NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
TIME = re.compile(r"^(\d{1,2}) ?: ?([0-5]\d)$")
"""A reference in this form is a time, not a ratio: 3:30 is not 1:10."""
HUGE = re.compile(
    r"\^\s*\{?\s*-?(?:\d{8,}|\d{2,}\s*\^\s*\{?\s*\d{2,}|\d+\s*\^\s*\{?\s*\d{3,})|\\sqrt[^{]{0,9}\{?\s*\d{60,}"
    r"|(?:binom|choose).*\d{4}|\d{4}.*choose"
)
"""Powers, roots and binomials that take the parser or sympy seconds."""
ORDER = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-z])")
CHOICES = re.compile(r"(?!.*([A-J]).*\1)[A-J](?:(?:\s*,\s*|\s+and\s+|\s*)[A-J])+|[①-⑳](?:[\s,]*[①-⑳])+")
"""Several choices, as AC or A, C."""
CONDITION = re.compile(
    r"^([a-z]) ?(?:\\in ?\\mathbb ?\{?([ZNQ])\b(\}? ?[\^_].*)?|(?:is )?(?:an? )?(positive )?integer)"
)
"""The values that a letter takes: k is an integer."""
SET = re.compile(
    r"^[A-Za-z]\s*\\in(?![a-z])|^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]\s*(?=[^=]*\1)([^=]*)\\\}$"
)
WORDS = re.compile(r"(?<![\\A-Za-z{])(?:[A-Za-z]{4,}|[A-Za-z]{2,} +[A-Za-z]{2,}|[A-Za-z]{3,} (?=\d))")
CUT_OFF = re.compile(r"(?<![\d.])\d+\s*\\ldots")
MATRIX = re.compile(
    r"^\\begin\{([pbB]?matrix|smallmatrix|array|cases)\}(?:\{[lcr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}$", re.DOTALL
)
TRANSPOSED = re.compile(r"\s*\^\s*\{?\s*(?:T|\\top)\s*\}?$")

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every text that it cannot parse
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


class Unreadable(ValueError):
    """A text that is not mathematics."""


class TooLarge(Unreadable):
    """A number that takes too long to compute."""


@dataclass(frozen=True, slots=True)
class Value:
    """An answer: a list of members, a chain of equations with several sides, or a single expression.

    key: the text without spaces; what cannot be read equals the same key. expression: None for what cannot be read,
    lists and chains. decimal: whether it contains a decimal fraction, so it may be rounded. brackets: around the
    members, as "[)"; "column", "row" and "rows" for a matrix. rounded: whether the sides are approximations.
    conditions: letters, each with the set of its values, as (k, Z) for k\\in\\mathbb{Z}.
    """

    key: str
    source: Quantity
    expression: Any = None
    decimal: bool = False
    members: tuple[Value, ...] = ()
    brackets: str = ""
    sides: tuple[Value, ...] = ()
    rounded: bool = False
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def is_number(self) -> bool:
        return is_number(self.expression)

    @property
    def answers(self) -> tuple[Value, ...]:
        """The last side of a chain, or any side of an approximation but its name."""
        sides = self.sides if self.rounded else self.sides[-1:]
        return tuple(one for one in sides if not isinstance(one.expression, Symbol)) or sides[-1:] or (self,)


def read(text: str) -> Value:
    """Read a result of `answer_expression`.

    Raises Unreadable if there is no answer.
    """
    if not (text := canonical(text)):
        raise Unreadable("there is no answer")
    if max(depths(text), default=0) > DEEPEST:
        return Value(_key(text), Quantity(text))  # the parser's time grows exponentially
    return _list(text)


def _key(text: str) -> str:
    """The text without spaces, except between digits; words in lower case."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\{(\w)\}", r"\1", text))
    return text.casefold() if re.search("[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", text)) else text


def _list(text: str, brackets: str = "") -> Value:
    """Read members between commas, "and" and "or"; without any, a single value."""
    if not any(c in text for c in "([") and "\\{" not in text:
        text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    parts = separate(text, ";")
    if len(parts) == 1 or len(separate(text, ",")) == 1:
        parts = separate(text, ",", ";", "and", "or")
    if CHOICES.fullmatch(text):
        parts = re.findall("[A-J①-⑳]", text)
    parts = [
        part.replace("\\pm", plus).replace("\\mp", minus)
        for part in parts
        if part
        for plus, minus in (("+", "-"), ("-", "+"))[: 1 + ("\\pm" in part)]
    ]
    if len(parts) == 1 and not brackets:
        return _chain(bare(parts[0]))
    found = [one for part in parts if (one := CONDITION.match(part))]
    conditions = tuple((one[1], "N" if one[2] != "Q" and (one[3] or one[4]) else one[2] or "Z") for one in found)
    members = tuple(_list(part) for part in parts if not CONDITION.match(part))
    if len(members) == 1 and not brackets:
        return replace(members[0], conditions=conditions)
    key = _key(brackets[:1] + text + brackets[1:])
    return _compound(members) or Value(key, Quantity(text), members=members, brackets=brackets)


def _compound(members: Sequence[Value]) -> Value | None:
    """The sum of quantities in units that become smaller, as 2 hours and 30 minutes; None for another list."""
    units = [one.source.unit for one in members if one.is_number and one.source.unit]
    sizes = [size for size, _ in units]
    if len(units) < max(2, len(members)) or len({kinds for _, kinds in units}) > 1 or sizes != sorted({*sizes})[::-1]:
        return None
    total = sum(one.expression * Rational(size) for one, size in zip(members, sizes, strict=True))
    unit = Fraction(1), units[0][1]
    return Value("", Quantity("", unit=unit, is_sum=True), total, any(one.decimal for one in members))


def _chain(text: str) -> Value:
    """Read the sides of a chain of equations or approximations; without any, a single value."""
    sides = [] if ORDER.search(text) else [_single(side) for side in separate(text, "=", "\\approx") if side]
    if len(sides) < 2:
        return sides[0] if sides else _single(text)
    percent = sides[-1].source.percent and all(one.is_number for one in sides)
    return Value(_key(text), sides[-1].source, sides=tuple(sides), rounded="\\approx" in text or percent)


def _single(text: str) -> Value:
    """Read a set, a tuple, an interval, a matrix, a ratio, a relation or an expression."""
    if found := SET.match(text):
        return _list(found[2] or text[found.end() :])
    turned = {"row": "column", "column": "row", "()": "column", "[]": "column"}
    if (rest := TRANSPOSED.sub("", text)) != text and (value := _single(rest)).brackets in turned:
        return replace(value, key=_key(text), brackets=turned[value.brackets])
    if found := MATRIX.match(text):
        cells = [row.split("&") for row in found[2].split("\\\\") if row.strip()]
        matrix = _matrix(text, [[_single(bare(cell)) for cell in row] for row in cells])
        return replace(matrix, brackets="cases") if found[1] == "cases" else matrix
    opened = text.removeprefix("\\")
    if (opened[:1] in ("(", "[") or text.startswith("\\{")) and encloses(opened):
        brackets, inner = opened[0] + opened[-1], opened[1:-1].removesuffix("\\").strip()
        if inner:
            return _list(inner, brackets if brackets == "{}" or len(separate(inner, ",", ";")) > 1 else "")
    parts = [_single(part) for part in separate(text, ":")] if text.count(":") > 1 else []
    if parts and all(one.is_number for one in parts):
        ratios = tuple(replace(one, expression=one.expression / parts[0].expression, key="") for one in parts)
        return Value(_key(text), Quantity(text), members=ratios, brackets="::")
    return _expression(text)


def _matrix(text: str, rows: Sequence[Sequence[Value]], expression: Any = None) -> Value:
    """A matrix of cells; expression: what it was computed from."""
    source, values = Quantity(text), [Value("", Quantity(""), members=tuple(row), brackets="row") for row in rows]
    if len(rows) == 1:
        return replace(values[0], key=_key(text), source=source, expression=expression)
    column = all(len(row) == 1 for row in rows)
    members = tuple(row[0] for row in rows) if column else tuple(values)
    return Value(_key(text), source, expression, members=members, brackets="column" if column else "rows")


def _expression(text: str) -> Value:
    """Read a number with its unit, or an expression."""
    found, key = quantity(text), _key(text)
    if clock := TIME.match(found.text):
        if int(clock[2]):
            return Value(key, found, Symbol(found.text.replace(" ", "")))
        found = replace(found, text=clock[1])  # 3:00 PM is 3 PM
    try:
        if found.base is not None:
            return Value(key, found, Integer(int(found.text, found.base)))  # ValueError: no numeral in this base
        if (plain := plain_number(found.text)) is not None:
            return Value(key, found, Rational(plain), "." in found.text)
        expression = parse_latex(found.text)
        guard(expression)
        if isinstance(expression, MatrixBase | sympy.MatrixExpr):
            explicit = exact(sympy.Matrix(expression.doit()))
            cells = [[Value("", Quantity(""), one) for one in row] for row in explicit.tolist()]
            return _matrix(text, cells, expression)
        expression = imaginary(expression)
        return Value(key, found, exact(expression), bool(expression.atoms(sympy.Float)))
    except TooLarge:
        return Value(key, found, sympy.nan)  # a number that equals its own text only
    except Exception:  # noqa: BLE001 - whatever the parser raises
        return Value(key, found)


@lru_cache(maxsize=4096)
def parse_latex(text: str) -> Any:
    """The sympy expression of LaTeX. Raises Unreadable, or whatever the parser raises."""
    if WORDS.search(text) or CUT_OFF.search(text) or (CHANGES.search(text) and DIGIT.search(text)):
        raise Unreadable("it has words")
    if HUGE.search(text):
        raise TooLarge("it is too large")
    normal = parser.normalize_latex(text, NORMAL)
    expression = parser.latex2sympy(
        normal, is_real=not should_treat_as_complex(normal), convert_degrees=True, normalization_config=None
    )
    if expression is None or expression in (sympy.nan, sympy.zoo):
        raise Unreadable(text)
    return expression


def exact(expression: Any) -> Any:
    """The expression with each decimal fraction as an exact rational number."""
    return expression.xreplace({one: Rational(str(one)) for one in expression.atoms(sympy.Float)})


def imaginary(expression: Any) -> Any:
    """The expression with the letter i as the imaginary unit."""
    i = [one for one in getattr(expression, "free_symbols", ()) if one.name == "i"]
    return expression.subs(i[0], sympy.I) if i else expression


def is_number(expression: Any) -> bool:
    return isinstance(expression, Expr) and not (
        isinstance(expression, MatrixBase) or expression.free_symbols or expression.atoms(AppliedUndef)
    )


def number(expression: Any) -> Any:
    """The number as a rational, an infinity or rounded to `DIGITS` digits. Raises Unreadable if it is too large."""
    guard(expression)
    value = expression.doit()
    return value if value.is_Rational or value in (oo, -oo) else value.evalf(DIGITS)


def guard(expression: Any) -> None:
    """Raise TooLarge if computing takes more than `LARGEST_DIGITS` digits or `MOST_TERMS` terms."""
    if isinstance(expression, Basic):
        _digits(expression)
        for node in expression.atoms(sympy.Product, sympy.Sum):
            lengths = [high - low for _, low, high in node.limits]
            terms = math.prod(float(n) + 1 for n in lengths if n.is_number)
            if MOST_TERMS < terms < math.inf:
                raise TooLarge("its sum or product has too many terms")


def _digits(node: Any) -> float:
    """An upper bound of the digits of a node's value. Raises TooLarge if it is above `LARGEST_DIGITS`."""
    inner = [_digits(one) for one in node.args if isinstance(one, Basic)]
    found = max(inner, default=0.0)
    if node.is_Rational:
        found = 0.302 * max(int(node.p).bit_length(), int(node.q).bit_length())
    elif isinstance(node, Mul):
        found = sum(inner)
    elif isinstance(node, Pow | sympy.factorial | sympy.factorial2 | sympy.gamma) and not node.args[-1].free_symbols:
        if inner[-1] > 7:
            raise TooLarge("it is too large")
        found = max(inner[0], 0.302) * max(1.0, float(abs(node.args[-1].evalf(5))))
    if found > LARGEST_DIGITS:
        raise TooLarge("it is too large")
    return found
