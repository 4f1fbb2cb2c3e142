"""Decides for `math` whether two answers are equal.

Only worker processes import this module, since math-verify takes seconds and memory.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped]
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from latex2sympy2_extended.logic import And  # type: ignore[import-untyped]
from math_verify.grader import is_assignment_relation, is_equation, is_relation, should_treat_as_complex, sympy_expr_eq
from sympy import (  # type: ignore[import-untyped]
    Add,
    Basic,
    Expr,
    FiniteSet,
    Float,
    Integer,
    Interval,
    MatrixBase,
    Mul,
    Pow,
    Product,
    Rational,
    Sum,
    Symbol,
    Tuple,
    factorial,
    factorial2,
    gamma,
    nan,
    oo,
    zoo,
)  # fmt: skip

from grpocli.rewards.final_answer import CHANGES, COMMAND, DIGIT, answer_expression, chosen_letter, is_choice
from grpocli.rewards.math_text import NormalizedText, normalized, plus_minus, rounded_equal

LONGEST_ANSWER = 2000
"""Most characters of an answer; four times the reference's length if that is more."""
LARGEST_DIGITS = 10_000
"""Most digits of a number that is computed."""
MOST_TERMS = 1000
"""Most terms of a sum or product that is computed term by term."""
DEEPEST = 12
"""Most levels of nested brackets that are parsed."""
DIGITS = 50
"""Digits of irrational numbers."""
NORMAL = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
APPROXIMATELY = re.compile(r"\\approx|\\simeq|\\cong|\\doteq")
EQUALS = re.compile(r"(?<![<>!:\\])=")
CALL = re.compile(
    r"\\(?:sum|prod|int|lim|[dt]?binom|choose|gcd|lcm|max|min|log|ln|lg|sin|cos|tan|cot|sec|csc|arc[a-z]+|exp|det"
    r"|[bp]?mod|lfloor|lceil|lvert|operatorname|circ)(?![a-z])|!|\|"
)
TIME = re.compile(r"^\d{1,2}\s?:\s?[0-5]\d$")
"""A reference in this form is a time, not a ratio: 3:30 is not 1:10."""
HUGE = re.compile(
    r"\^\s*\{?\s*-?(?:\d{8,}|\d{2,}\s*\^\s*\{?\s*\d{2,}|\d+\s*\^\s*\{?\s*\d{3,})|\\sqrt[^{]{0,9}\{?\s*\d{60,}"
)
"""Powers and roots that take the parser or sympy seconds."""
POINT = re.compile(r"(?<!\d)0*(\d*)\.(\d+)")
MIXED = re.compile(r"\d\s*\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
ORDER = re.compile(r"[<>]|\\(?:lt|gt|le|ge|leq|geq)(?![a-z])")
NAMED = re.compile(r"^\s*(?:[A-Za-z]\w*\s*\([^()=]*\)|\|[A-Z]{1,3}\||[A-Za-z]_\{[^{}=]*\})\s*=(?=.)")
"""f(2), P(A|B), |AB| or x_{\\max} before an equals sign, which name the answer."""
LETTER = re.compile(r"[A-Za-z]")
SIDE_BY_SIDE = re.compile(
    r"[\d.)\]}]\s*(?:\\left\s*)?[(\[]|[)\]]\s*(?:\\right\s*)?\d|\d\s+\d|(?<![A-Za-z}\]^_])\{[\d.]+\}\s*\{"
)
"""Factors of a number without a sign between them: (51)(3), which the parser reads as 51 + 3."""
PRODUCT = re.compile(r"(?:\\times|\\cdot|\*|\\ast)(?!\s*10\s*\^)")

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every text that it cannot parse
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


class Unreadable(ValueError):
    """A text that is not mathematics, or a number that is too large to compute."""


@dataclass(frozen=True, slots=True)
class Value:
    """A parsed answer. decimal: whether it contains a decimal fraction, so it may be rounded."""

    source: NormalizedText
    expression: Any
    decimal: bool = False

    @property
    def is_number(self) -> bool:
        return _is_number(self.expression)


def equal(gold: str, text: str | None, require_evaluated: bool = True) -> float:
    """1 if the final answer in `text` equals the one in `gold`, or if `text` is None, else 0.

    Raises ValueError if `gold` cannot be parsed, never because of `text`.
    """
    reference = _gold(gold)
    if text is None:
        return 1.0
    if is_choice(gold) and (letter := chosen_letter(text)):
        return float(letter == chosen_letter(gold))
    try:
        return float(_answers(reference, answer_expression(text), require_evaluated))
    except Exception:  # noqa: BLE001 - unreadable, too deep or too large: a wrong answer
        return 0.0


def same(one: str, other: str) -> float:
    """1 if two results of `answer_expression` are equal, else 0; for majority voting."""
    try:
        return float(_equal(_value(one), _value(other)))
    except Exception:  # noqa: BLE001 - an unreadable text equals nothing else
        return 0.0


def compute(name: str, *arguments: Any) -> float:
    """Call `equal` or `same` by name, so that one pool of workers serves both."""
    return same(*arguments) if name == "same" else equal(*arguments)


@lru_cache(maxsize=4096)
def _gold(gold: str) -> Value:
    """Parse a reference: a number, LaTeX, GSM8K's "... #### 42", a boxed solution or a sentence. Raises ValueError."""
    text = answer_expression(gold)
    try:
        value = _value(text)
        if value.is_number:
            with suppress(Unreadable):  # too large to compute: equal only to the same text
                _number(value.expression)
    except Exception as error:
        raise ValueError(f"no mathematics can be read from the reference answer {gold[:200]!r}") from error
    return value


def _answers(reference: Value, text: str, require_evaluated: bool) -> bool:
    """Whether an expression, or any side of a correct approximation, equals the reference."""
    if len(text) > max(LONGEST_ANSWER, 4 * len(reference.source.text)):
        return False
    if "=" not in reference.source.text:
        text = NAMED.sub("", text)
    strict = require_evaluated and _evaluated(reference)
    parts = _members(text)
    if strict and not any(_calls(normalized(part).text) <= _calls(reference.source.text) for part in parts):
        return False  # checked before the value is computed
    times = TIME.match(reference.source.text) is not None
    values = [_value(part, times) for part in parts if part.strip()]
    if len(values) > 1 and isinstance(values[0].expression, Symbol):  # x is about 11
        values = values[1:]
    if not values or not all(_rounds(values[0], value) for value in values[1:]):
        return False
    return any(_equal(reference, value) and not (strict and not _evaluated(value, reference)) for value in values)


def _members(text: str) -> list[str]:
    """The sides of an approximation, and of equations of numbers that end in a percentage, such as 1/2 = 50\\%."""
    if normalized(text).percent and not LETTER.search(COMMAND.sub("", text)):
        return re.split(rf"{APPROXIMATELY.pattern}|{EQUALS.pattern}", text)
    return APPROXIMATELY.split(text)


def _rounds(value: Value, rounded: Value) -> bool:
    """Whether `rounded` is `value`, rounded or truncated to the decimal places of `rounded`."""
    exact, near = _last(value.expression), _last(rounded.expression)
    if not (_is_number(exact) and _is_number(near)):
        return False
    places = len(rounded.source.text.rpartition(".")[2]) if "." in rounded.source.text else 0
    scale = 10 ** (places + 2 * (rounded.source.percent and not value.source.percent))
    exact, near = _number(exact) * scale, _number(near) * 10**places
    cut = places and exact * near >= 0 and 0 <= abs(exact) - abs(near) < 1
    return bool(abs(exact - near) <= Rational(1, 2) or cut)


def _value(text: str, times: bool = True) -> Value:
    """Read an answer. times: 3:30 is a time of day, not a ratio. Raises Unreadable."""
    if not text.strip():
        raise Unreadable("there is no answer")
    if _depth(text) > DEEPEST:
        raise Unreadable("its brackets are too deep")  # the parser's time grows exponentially
    found = normalized(text)
    if TIME.match(found.text) and (times or found.text.endswith(":00")):  # a ratio with 0 is none
        return Value(found, Symbol(found.text.replace(" ", "")))
    if found.base is not None:
        return Value(found, Integer(int(found.text, found.base or 1)))  # ValueError: no numeral in this base
    if (number := found.number) is not None:
        return Value(found, Rational(number.numerator, number.denominator), "." in found.text)
    if CHANGES.search(found.text) and DIGIT.search(found.text):
        raise Unreadable("words change its number")
    if HUGE.search(found.text):
        raise Unreadable("it is too large")
    expression = _parsed(plus_minus(found.text))
    exact = _exact(expression)
    return Value(found, exact, exact != expression)


def _depth(text: str) -> int:
    """The depth of nested brackets."""
    return max(accumulate((c in "([{") - (c in ")]}") for c in text), default=0)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """The sympy expression of LaTeX; the last member of a chain of equations that cannot be read as a whole.

    Raises Unreadable, or whatever the parser raises.
    """
    if re.search(r"binom|choose", text) and re.search(r"\d{4}", text):
        raise Unreadable("it is too large")  # the parser computes it
    try:
        expression = _latex(text)
    except Exception:
        sides = EQUALS.split(text)
        if len(sides) < 2 or "," in text:
            raise
        expression = _latex(sides[-1])
        if any(any(c.isdigit() for c in side) for side in sides[:-1]):
            raise
    if expression is None or expression in (nan, zoo):
        raise Unreadable(text)
    return expression


def _latex(text: str) -> Any:
    normal = normalize_latex(text.replace("**", "^"), NORMAL)
    return latex2sympy(
        normal, is_real=not should_treat_as_complex(normal), convert_degrees=False, normalization_config=None
    )


def _exact(expression: Any) -> Any:
    """The expression with each decimal fraction as an exact rational number."""
    if isinstance(expression, Float):
        return Rational(str(expression))
    if isinstance(expression, MatrixBase):
        return expression.applyfunc(_exact)
    if isinstance(expression, Basic) and expression.args and expression.atoms(Float):
        # sets and chains keep the order of the text
        args = [_exact(one) for one in getattr(expression, "_unsorted_args", expression.args)]
        return expression.func(*args, evaluate=False) if is_relation(expression) else expression.func(*args)
    return expression


def _equal(reference: Value, answer: Value) -> bool:
    """Whether the expressions are equal, directly or as percents, and bases, units and brackets agree."""
    a, b = reference.source, answer.source
    if a.base != b.base or (a.unit and b.unit and a.unit != b.unit):
        return False
    if {a.brackets, b.brackets} in ({"{", "("}, {"{", "["}):
        return False
    if isinstance(reference.expression, FiniteSet | Tuple) and ORDER.search(b.text):
        return False  # 2 < x < 3 is parsed as the interval (2, 3), which looks like a pair
    decimal = reference.decimal or answer.decimal
    if _same(reference.expression, answer.expression, decimal):
        return True
    if a.percent == b.percent:
        return False
    scale = Rational(1, 100)
    return (
        _is_number(last := _last(answer.expression))
        and reference.is_number
        and _numbers_equal(
            reference.expression * (scale if a.percent else 1), last * (scale if b.percent else 1), decimal
        )
    )


def _same(reference: Any, answer: Any, decimal: bool) -> bool:
    """Whether two expressions are equal. decimal: either may be rounded."""
    if is_assignment_relation(reference) and not is_relation(answer):
        reference = _last(reference)
    if is_equation(answer) and not _consistent(answer, decimal):
        return False
    if not is_relation(reference) and is_equation(answer):
        answer = _last(answer)
    if _is_number(reference) and _is_number(answer):
        return _numbers_equal(reference, answer, decimal)
    if _is_number(reference) and isinstance(answer, Expr) and not isinstance(answer, Symbol):
        return False  # the answer has unknowns
    ours, theirs = _elements(reference), _elements(answer)
    if ours and theirs and (len(ours) > 1 or len(theirs) > 1):
        return _all_same(reference, answer, decimal)
    if isinstance(reference, MatrixBase) and isinstance(answer, MatrixBase):
        pairs = zip(reference.flat(), answer.flat(), strict=False)
        return reference.shape == answer.shape and all(_same(a, b, decimal) for a, b in pairs)
    _guard(reference)
    _guard(answer)
    return bool(sympy_expr_eq(reference, answer, 6, 15, allow_set_relation_comp=True))


def _consistent(chain: Any, decimal: bool) -> bool:
    """Whether all numbers in a chain of equations are one number."""
    numbers = [side for side in _sides(chain) if _is_number(side)]
    return all(_numbers_equal(numbers[-1], number, decimal) for number in numbers[:-1])


def _sides(relation: Any) -> list[Any]:
    """The members of a chain of equations or inequalities, in order; for another expression, itself."""
    if isinstance(relation, And):
        return [side for one in relation._unsorted_args for side in _sides(one)]
    return [relation.lhs, relation.rhs] if is_relation(relation) else [relation]


def _last(expression: Any) -> Any:
    """The last member of a chain of equations, or the expression itself."""
    return _sides(expression)[-1] if is_equation(expression) else expression


def _elements(expression: Any) -> Sequence[Any]:
    """The elements of a list, a finite set, a tuple or an open interval, the parse of (a, b); else none."""
    if isinstance(expression, FiniteSet):
        return list(
            getattr(expression, "_unsorted_args", expression.args)
        )  # in the order of the text: a pair may have no brackets
    if isinstance(expression, Tuple):
        return list(expression.args)
    if isinstance(expression, Interval) and expression.is_open:
        return [expression.start, expression.end]
    return []


def _members_of(expression: Any) -> Sequence[Any]:
    """The elements of a list or the like; for another expression, itself."""
    return _elements(expression) or [_last(expression)]


def _by_name(elements: Sequence[Any]) -> list[Any]:
    """Assignments to different letters, y=2 and x=1, sorted by letter; other elements unchanged."""
    names = [one.lhs.name for one in elements if is_assignment_relation(one) and isinstance(one.lhs, Symbol)]
    if len(elements) > 1 and len(set(names)) == len(elements):
        return sorted(elements, key=lambda one: str(one.lhs.name))
    return list(elements)


def _all_same(reference: Any, answer: Any, decimal: bool) -> bool:
    """Whether the elements are equal: in order if either list is ordered, else in any order."""
    sets = isinstance(reference, FiniteSet) and isinstance(answer, FiniteSet)
    ours, theirs = (list(one.args) if sets else list(_elements(one)) for one in (reference, answer))
    if len(ours) != len(theirs):
        return False
    if not sets:
        ours, theirs = _by_name(ours), _by_name(theirs)
        return all(_same(a, b, decimal) for a, b in zip(ours, theirs, strict=True))
    for one in ours:
        place = next((i for i, other in enumerate(theirs) if _same(one, other, decimal)), None)
        if place is None:
            return False
        theirs.pop(place)
    return True


def _is_number(expression: Any) -> bool:
    return isinstance(expression, Expr) and not isinstance(expression, MatrixBase) and not expression.free_symbols


def _numbers_equal(a: Any, b: Any, decimal: bool) -> bool:
    """Whether numbers are equal: exactly, by `rounded_equal` if `decimal`, or to 25 digits if irrational."""
    if a == b:
        return True
    x, y = _number(a), _number(b)
    if x == y:
        return True
    if not (x.is_comparable and y.is_comparable):
        return bool(sympy_expr_eq(a, b, 6, 15))
    if x in (oo, -oo) or y in (oo, -oo):
        return False
    if decimal:
        return bool(rounded_equal(x, y))
    exact = x.is_Rational and y.is_Rational and _is_rational(a) and _is_rational(b)
    return not exact and bool(abs(x - y) <= max(abs(x), abs(y)) * Rational(1, 10 ** (DIGITS // 2)))


def _number(expression: Any) -> Any:
    """The number as an exact rational, or rounded to `DIGITS` digits. Raises Unreadable if it is too large."""
    if expression.is_Rational or expression in (oo, -oo):
        return expression
    _guard(expression)
    value = expression.doit()
    if value.is_Rational or value in (oo, -oo):
        return value
    value = value.evalf(DIGITS)
    return Rational(str(value)) if value.is_Float else value


def _guard(expression: Any) -> None:
    """Raise Unreadable if computing the expression takes more than `LARGEST_DIGITS` digits."""
    if isinstance(expression, Basic):
        _digits(expression)
        if any(_is_long(one) for one in expression.atoms(Product, Sum)):
            raise Unreadable("its sum or product has too many terms")


def _digits(node: Any) -> float:
    """An upper bound of the digits of a node's value. Raises Unreadable if it is above `LARGEST_DIGITS`."""
    inner = [_digits(one) for one in node.args if isinstance(one, Basic)]
    found = max(inner, default=0.0)
    if node.is_Rational:
        found = 0.302 * max(int(node.p).bit_length(), int(node.q).bit_length())
    elif isinstance(node, Mul):
        found = sum(inner)
    elif isinstance(node, Pow) and not node.exp.free_symbols:
        found = max(inner[0], 0.302) * _size(node.exp, inner[1])
    elif isinstance(node, factorial | factorial2 | gamma) and not node.free_symbols:
        found = max(inner[0], 0.302) * _size(node.args[0], inner[0])
    if found > LARGEST_DIGITS:
        raise Unreadable("it is too large")
    return found


def _is_long(node: Any) -> bool:
    """Whether a sum or product has more than `MOST_TERMS` terms; polynomials are summed by a formula."""
    if isinstance(node, Sum) and node.function.is_polynomial():
        return False
    lengths = [high - low for _, low, high in node.limits]
    return MOST_TERMS < math.prod(float(n) + 1 for n in lengths if n.is_number) < math.inf


def _size(node: Any, digits: float) -> float:
    """The absolute value of a number with `digits` digits, at least 1. Raises Unreadable above 7 digits."""
    if digits > 7:
        raise Unreadable("it is too large")
    return max(1.0, float(abs(node.evalf(5))))


def _evaluated(value: Value, reference: Value | None = None) -> bool:
    """Whether a value is fully evaluated: no sum or product of rationals, and only calls that the reference has."""
    text = value.source.text
    if not _calls(text) <= (_calls(reference.source.text) if reference else set()):
        return False
    if any(int(above or one) >= int(below or other) for above, one, below, other in MIXED.findall(text)):
        return False  # 51 23/1 is a sum, not a mixed number
    if SIDE_BY_SIDE.search(EQUALS.split(text)[-1]) and any(
        _computes_to_rational(one) for one in _members_of(value.expression)
    ):
        return False
    products = bool(PRODUCT.search(text))
    expression = _last(value.expression)
    if value.decimal and value.source.number is None:
        expression = _last(_parsed(POINT.sub(_whole, plus_minus(text))))  # the parser evaluates decimals at once
    if getattr(expression, "free_symbols", True):
        return reference is not None
    return _is_value(expression, products)


def _calls(text: str) -> set[str]:
    """The calls in the last member of a chain of equations."""
    last = EQUALS.split(text)[-1]
    whole = last.count("{") == last.count("}")  # the = in \sum_{k=1} is not a chain
    return set(CALL.findall((last if whole else text).replace("\\!", "")))


def _whole(found: re.Match[str]) -> str:
    """A decimal fraction as a whole number, which keeps the structure of the expression."""
    return (found[1] + found[2]).lstrip("0") or "0"


def _is_value(node: Any, products: bool) -> bool:
    """Whether no sum or product has two rational members. products: whether the text has a multiplication sign."""
    args = getattr(node, "args", ())
    if not all(_is_value(one, products) for one in args if isinstance(one, Basic)):
        return False
    if isinstance(node, Add):
        return sum(_computes_to_rational(one) for one in args) <= 1
    if isinstance(node, Mul):
        return sum(_is_factor(one, products) for one in args) <= 1
    return True


def _is_rational(node: Any) -> bool:
    """Whether it is a rational number, or an unevaluated product or integer power of rational numbers."""
    if isinstance(node, Mul):
        return all(_is_rational(one) for one in node.args)
    if isinstance(node, Pow) and node.base.is_Rational and node.exp.is_Integer:
        return True
    return bool(node.is_Rational)


def _computes_to_rational(node: Any) -> bool:
    """Whether its value is rational, as for \\sqrt{9} and \\pi/\\pi."""
    if _is_rational(node) or not _is_number(node):
        return _is_rational(node)
    _guard(node)
    return bool(node.doit().is_Rational)


def _is_factor(node: Any, products: bool) -> bool:
    """Whether a node is a rational factor, except a sign, a denominator or a power of ten."""
    if isinstance(node, Pow) and node.exp == -1:
        return _is_rational(node.base) and not node.base.is_Integer  # 51/(1/3)
    if isinstance(node, Pow):
        return node.base != 10 and _computes_to_rational(node)
    return _is_rational(node) and (products or abs(node.p if node.is_Rational else 0) != 1) and node != -1
