"""Decides for `math` whether two answers are equal: reads both whole, then compares.

Only worker processes import this module, since math-verify takes seconds and memory.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify.grader import is_relation, sympy_expr_eq, unwrap_fcs
from sympy import Add, Basic, Expr, Integer, Mul, Pow, Rational, Symbol, oo
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

from grpocli.answers.final_answer import answer_expression, choice, chosen_letter, reference_expression
from grpocli.answers.math_text import Quantity, plain_number, rounded_equal
from grpocli.answers.math_value import DIGITS, TIME, WORDS, Value, imaginary, is_number, number, parse_latex, read

LONGEST_ANSWER = 2000
"""Most characters of an answer; four times the reference's length if that is more."""
CALL = re.compile(
    r"\\(?:sum|prod|int|lim|Gamma|[dt]?binom|choose|gcd|lcm|max|min|log|ln|sin|cos|tan|cot|sec|csc|arc[a-z]+|exp|det"
    r"|[bp]?mod|lfloor|lceil|circ)(?![a-z])|!|\||\\begin(?=\{vmatrix|.*\\begin)|\\end\{.matrix\}\^"
    r"|(?<!frac\d\d)(?<=\d)\s*(?:\\cdot|\\times)?\s*(?=\\begin\{.matrix)",
    re.DOTALL,
)
"""What computes something, the last one a factor of a matrix that is no fraction."""
POINT = re.compile(r"(?<!\d)0*(\d*)\.(\d+)")
MIXED = re.compile(r"\d\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
SIDE_BY_SIDE = re.compile(r"[\d.)\]}]\s*[(\[]|[)\]]\s*\d|\d\s+\d|(?<![A-Za-z}\]^_])\{[\d.]+\}\s*\{")
"""Factors of a number without a sign between them: (51)(3), which the parser reads as 51 + 3."""
ANGLES = {("degree", 1), ("radian", 1)}
TEMPERATURES = [{("degree", 1), (scale, 1)} for scale in "CF"]
"""Units that are not told apart: -3 degrees may be degrees Celsius."""
PRODUCT = re.compile(r"(?:\\times|\\cdot|\*)(?!\s*10\s*\^)")


def equal(gold: str, text: str | None, require_evaluated: bool = True) -> float:
    """1 if the final answer in `text` equals the one in `gold`, or if `text` is None, else 0.

    Raises ValueError if `gold` has no answer, never because of `text`.
    """
    reference = _gold(gold)
    if text is None:
        return 1.0
    if (wanted := choice(gold)) and (letter := chosen_letter(text)):
        return float(letter == wanted)
    readings = {answer_expression(text), reference_expression(text)}  # of a short text without a mark also all of it
    return float(any(_right(reference, answer, require_evaluated) for answer in readings))


def _right(reference: Value, answer: str, strict: bool) -> bool:
    if len(answer) > max(LONGEST_ANSWER, 4 * len(reference.key)):
        return False
    if (clock := TIME.match(answer)) and reference.source.is_sum:  # 2:05 for 2 minutes and 5 seconds
        return reference.expression in {60**n * (60 * int(clock[1]) + int(clock[2])) for n in (0, 1)}
    if clock and int(clock[2]) and not TIME.match(reference.source.text):  # a ratio
        answer = answer.replace(":", "/")
    try:
        value = read(answer)
        letters = {own: other for (own, _), (other, _) in zip(value.conditions, reference.conditions, strict=False)}
        if letters:  # n in n\pi, n\in\mathbb{Z} becomes the reference's letter
            letter = r"(?<![A-Za-z\\])[a-z](?![A-Za-z])"
            value = read(re.sub(letter, lambda found: letters.get(found[0], found[0]), answer))
        return _equal(reference, value, strict)
    except Exception:  # noqa: BLE001 - empty, or too large: a wrong answer
        return False


@lru_cache(maxsize=4096)
def _gold(gold: str) -> Value:
    """Read a reference: a number, LaTeX, GSM8K's "... #### 42", a boxed solution or a sentence. Raises ValueError."""
    try:
        value = read(reference_expression(gold))
    except ValueError as error:
        raise ValueError(f"{error} in the reference answer {gold[:200]!r}") from error
    if value.is_number:
        number(value.expression)  # a reference that takes too long is told from a slow completion
    return value


def _equal(a: Value, b: Value, strict: bool) -> bool:
    """Whether the answer `b` equals the reference `a`. strict: b is evaluated if a is."""
    if a.conditions and b.conditions and a.conditions != b.conditions:
        return False
    if a.key and a.key == b.key:
        return True
    if b.sides and not _consistent(b):
        return False
    if a.sides and b.sides:
        return _chains_equal(a, b, strict)
    if a.sides or b.sides:
        named = not a.sides or _names(a)
        return named and any(_equal(one, other, strict) for one in a.answers for other in b.answers)
    if (_is_set(a) or _is_set(b)) and (ours := _set(a)) is not None and (theirs := _set(b)) is not None:
        if strict and a.members and not b.members and theirs.is_finite_set:  # {1} \cup {2} is left to compute
            return False
        return ours.is_finite_set == theirs.is_finite_set and bool(sympy_expr_eq(ours, theirs, 6, 15))
    if strict and _leaves_work(a, b):
        return False
    return _members_equal(a, b, strict) if a.members or b.members else _expressions_equal(a, b)


def _chains_equal(a: Value, b: Value, strict: bool) -> bool:
    """Whether two equations, or chains of them, are equal: the same name and value, or the same equation."""
    ours, theirs = a.sides[0], b.sides[0]
    named = ours.is_number or theirs.is_number or WORDS.search(theirs.key) or WORDS.search(ours.key)
    if named or {ours.key, theirs.key} == {"y", "f(x)"} or _equal(ours, theirs, strict=False):
        return any(_equal(one, other, strict) for one in a.answers for other in b.answers)
    if ours.expression.atoms(AppliedUndef) != theirs.expression.atoms(AppliedUndef):  # f(2) is not f(3)
        return False
    one, two = (sympy.Eq(c.sides[0].expression, c.sides[-1].expression, evaluate=False) for c in (a, b))
    return bool(sympy_expr_eq(one, two, 6, 15))


def _names(chain: Value) -> bool:
    """Whether an equation names the value on its right, as x = 5, f(2) = 5 and 2 + 3 = 5 do, but not 2x = 10."""
    name, value = chain.sides[0], chain.sides[-1]
    if name.is_number or not isinstance(name.expression, Basic):
        return value.is_number or not name.is_number
    calls = dict.fromkeys(name.expression.atoms(AppliedUndef, sympy.Derivative), Symbol("y"))
    return not isinstance(name.expression, Add) and name.expression.xreplace(calls).atoms(sympy.Number) <= {Integer(-1)}


def _consistent(chain: Value) -> bool:
    """Whether all numbers in a chain are one number, which may be rounded where the chain says so."""
    numbers = [side for side in chain.sides if side.is_number]
    if chain.rounded:
        return all(_rounds(numbers[0], one) for one in numbers[1:])
    decimal = any(one.decimal for one in numbers)
    return all(_numbers_equal(numbers[-1].expression, one.expression, decimal) for one in numbers[:-1])


def _rounds(value: Value, rounded: Value) -> bool:
    """Whether `rounded` is `value`, rounded or truncated to the decimal places of `rounded`."""
    places = len(rounded.source.text.rpartition(".")[2]) if "." in rounded.source.text else 0
    scale = 10 ** (places + 2 * (rounded.source.percent and not value.source.percent))
    exact, near = number(value.expression) * scale, number(rounded.expression) * 10**places
    cut = places and exact * near >= 0 and 0 <= abs(exact) - abs(near) < 1
    return bool(abs(exact - near) <= Rational(1, 2) or cut)


def _is_set(value: Value) -> bool:
    """Whether it can only be a set of numbers: a relation, a union, an inequality among several."""
    if value.members:
        return value.brackets == "" and any(_is_set(one) for one in value.members)
    return isinstance(value.expression, sympy.Set) or is_relation(value.expression)


def _set(value: Value) -> Any:
    """The set of an interval, of a relation with one unknown, or of a list of these; None for anything else."""
    if not value.members:
        if isinstance(value.expression, sympy.Set):
            return value.expression.doit()
        if is_relation(value.expression) and len(value.expression.free_symbols) == 1:
            return unwrap_fcs(value.expression).as_set()
        return None
    ends = [one.expression for one in value.members]
    if value.brackets and value.brackets[0] in "([" and len(ends) == 2 and all(map(is_number, ends)):
        return sympy.Interval(*ends, left_open=value.brackets[0] == "(", right_open=value.brackets[1] == ")")
    if value.brackets == "{}" and all(isinstance(end, Expr) for end in ends):
        return sympy.FiniteSet(*ends)
    sets = [_set(one) for one in value.members]
    if value.brackets or None in sets or len({one for end in ends for one in getattr(end, "free_symbols", ())}) > 1:
        return None
    either = re.search(r"\bor\b", value.source.text) or not all(is_relation(one.expression) for one in value.members)
    return (not either and sympy.Intersection(*sets)) or sympy.Union(*sets)


def _members_equal(a: Value, b: Value, strict: bool) -> bool:
    """Whether lists, sets, tuples, intervals or matrices are equal: in order if either is ordered."""
    if len(a.members) == 1 and a.brackets in ("", "{}") and not (b.members or _is_set(b)):
        return _equal(a.members[0], b, strict)
    if len(b.members) == 1 and b.brackets in ("", "{}") and not (a.members or _is_set(a)):
        return _equal(a, b.members[0], strict)
    kinds = {a.brackets, b.brackets} - {""}
    vector = kinds & {"column", "row", "rows"} and kinds & {"()", "[]"}
    if (len(kinds) > 1 and not vector) or not (a.members and b.members):
        return False
    ours, theirs = list(a.members), list(b.members)
    nouns = {one.source.noun for one in ours}
    alike = len(nouns) > 1 and nouns == {one.source.noun for one in theirs}

    def agree(one: Value, other: Value) -> bool:
        return (not alike or one.source.noun == other.source.noun) and _equal(one, other, strict)

    labels = "".join(one.sides[0].key for one in ours if one.sides)
    labelled = len(labels) == len(ours) and [*labels] == sorted({*labels})  # (a) 5 (b) 6 is 5, 6 in this order
    if labelled or kinds - {"{}", "cases"}:
        return len(ours) == len(theirs) and all(map(agree, _by_name(ours), _by_name(theirs)))
    pairs = [[agree(one, other) for other in theirs] for one in ours]
    return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))


def _by_name(elements: list[Value]) -> list[Value]:
    """Assignments to different letters, y=2 and x=1, sorted by letter; other elements unchanged."""
    names = {one.sides[0].key for one in elements if one.sides and isinstance(one.sides[0].expression, Symbol)}
    return sorted(elements, key=lambda one: one.sides[0].key) if len(names) == len(elements) else elements


def _expressions_equal(a: Value, b: Value) -> bool:
    """Whether expressions are equal, directly or as percents, and their bases and named units agree."""
    x, y = a.source, b.source
    if a.expression is None or b.expression is None or x.base != y.base:
        return False
    if x.unit and y.unit:
        if x.unit[1] != y.unit[1] and {*x.unit[1], *y.unit[1]} not in [*TEMPERATURES, ANGLES]:
            return False
    elif x.is_sum or y.is_sum or (x.percent and (y.unit or y.noun)) or (y.percent and (x.unit or x.noun)):
        return False
    if a.is_number and b.is_number:
        ours, theirs, decimal = a.expression, b.expression, a.decimal or b.decimal
        if x.unit and y.unit and x.unit != y.unit:
            ours *= Rational(x.unit[0] / y.unit[0])
        scales = {(1, 1), (_scale(x), _scale(y))}
        if x.unit and y.unit and {*x.unit[1], *y.unit[1]} == ANGLES:
            scales.remove((1, 1))
        return any(_numbers_equal(ours * p, theirs * q, decimal) for p, q in scales)
    return bool(sympy_expr_eq(a.expression, b.expression, 6, 15))


def _scale(quantity: Quantity) -> Any:
    """The value of a percent sign, or of a sign of degrees in radians."""
    if quantity.percent:
        return Rational(1, 100)
    return sympy.pi / 180 if quantity.unit and quantity.unit[1] == (("degree", 1),) else 1


def _numbers_equal(a: Any, b: Any, decimal: bool) -> bool:
    """Whether numbers are equal: exactly, by `rounded_equal` if `decimal`, or to 25 digits if irrational."""
    if a == b or sympy.nan in (a, b):
        return bool(a == b) and a is not sympy.nan
    x, y = number(a), number(b)
    if x == y or oo in (abs(x), abs(y)):
        return bool(x == y)
    if decimal:
        return rounded_equal(x, y)
    exact = x.is_Rational and y.is_Rational
    return not exact and bool(abs(x - y) <= max(abs(x), abs(y)) / 10 ** (DIGITS // 2))


def _leaves_work(reference: Value, answer: Value) -> bool:
    """Whether more is left to compute in an answer than in its reference: a call, an unknown, a sum of numbers."""
    a, b = reference, answer
    calls = _calls(a)
    if a.members or b.members:
        return b.expression is not None and not _calls(b) <= calls
    if not _unknowns(b) <= _unknowns(a):
        return True
    evaluated = bool(a.source.text) and a.is_number and not calls and not _combines(a)
    return evaluated and (not _calls(b) <= calls or _combines(b))


def _calls(value: Value) -> set[str]:
    return set(CALL.findall(value.source.text))


def _unknowns(value: Value) -> set[Any]:
    """The letters of an expression, and the kinds of its derivatives and integrals."""
    operators = value.expression.atoms(sympy.Derivative, sympy.Integral) if isinstance(value.expression, Basic) else ()
    return {one.name for one in getattr(value.expression, "free_symbols", ())} | set(map(type, operators))


def _combines(value: Value) -> bool:
    """Whether the text of a number has numbers to combine, as a sum or a product has. A fraction or a power is one."""
    text = value.source.text
    if plain_number(text) is not None or not text or not value.is_number:
        return False
    if any(int(above or one) >= int(below or other) for above, one, below, other in MIXED.findall(text)):
        return True  # 51 23/1 is a sum, not a mixed number
    if SIDE_BY_SIDE.search(text) and _is_rational(value.expression):
        return True
    # without points, since the parser evaluates decimals at once
    structure = parse_latex(POINT.sub(lambda found: (found[1] + found[2]).lstrip("0") or "0", text))
    signs = bool(PRODUCT.search(text))
    return any(_has_several(node, signs) for node in sympy.preorder_traversal(structure))


def _has_several(node: Basic, signs: bool) -> bool:
    """Whether a sum or product has two rational members, or irrational ones that cancel, as in \\frac{5\\pi}{\\pi}.

    A sign, a denominator and a power of ten are no members of a product. signs: of multiplication, in the text.
    """
    if oo in node.args:
        return not {*node.args} <= {oo, -1}
    if not isinstance(node, Add | Mul):
        return False
    rational = [one for one in node.args if _is_rational(one)]
    if isinstance(node, Add):
        return len(rational) > 1
    powers = [one for one in rational if isinstance(one, Pow)]
    factors = [one for one in rational if one not in powers and one != -1 and (signs or abs(one) != 1)]
    factors += [one for one in powers if one.base != 10 and not (one.exp == -1 and one.base.is_Integer)]
    return len(factors) > 1 or (len(rational) < len(node.args) and _is_rational(node))


def _is_rational(node: Basic) -> bool:
    """Whether its value is rational, as for \\sqrt{9}, \\pi/\\pi and i^2."""
    node = imaginary(node)
    return is_number(node) and bool(node.doit().is_Rational)
