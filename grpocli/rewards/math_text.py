"""Normalizes the text of an answer: removes units, percent signs, bases, separators and delimiters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from grpocli.rewards.final_answer import MULTIPLIERS, NO_UNIT

UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\neq ", "≈": "\\approx ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ",
        "²": "^2", "³": "^3", "√": "\\sqrt ", "°": "^\\circ ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
        "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "",
    }
)  # fmt: skip
FRACTION_NAMES = re.compile(r"\\(?:nice|s|x)frac(?![a-z])")
NEGATIVE_SPACE = re.compile(r"\\!\s*")
SPACES = re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~")
DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\[", "\\]"), ("\\(", "\\)"), ("**", "**"), ("`", "`"))
STYLE = re.compile(r"^\\(?:text|textbf|mathbf|mathrm|mathit|textrm|mbox|boldsymbol|bm|underline)\s*\{([^{}]*)\}$")
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\s|\{,\})\d{3})+(?![\d,])")
SEPARATOR = re.compile(r"\s|\{,\}")
EXPONENT = re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)$")
MIXED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d./])")
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*\b(?:percent|per cent|pct)\b\.?|\\text\{\s*(?:\\?%|percent)\s*\})\s*$")
CELSIUS = r"(?:\\text\{[CFK]\}|\\mathrm\{[CFK]\}|[CFK])?"
DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\\text\{\s*degrees?\s*\})\s*" + CELSIUS + r"\s*$")
CURRENCY = re.compile(r"(?<![\d}])\\?[$€£¥₹]|\\?[$€£¥₹]\s*$|\\(?:euro|pounds)\b")
SQUARED = r"(?:\s*\^\s*\{?-?\d\}?)?\s*$"
TEXT = r"\\(?:text(?:rm|bf|it|sf|normal)?|mbox|math(?:rm|bf|it))"
TEXT_UNIT = re.compile(r"(?<=[\d})\]a-z])\s*" + TEXT + r"\s*\{\s*([^{}]*?)\s*\}" + SQUARED)
SHORT = "cm|mm|km|kg|mg|ft|mi|lb|lbs|oz|hr|hrs|ml|mL"
LONG_UNIT = re.compile(
    rf"(?<=[\d}}])\s+((?:[A-Za-z]{{3,}}\.?|of|in|a|an|the|per|by|[a-z]{{1,3}}/[a-z]{{1,3}}|{SHORT}|[ap]\.?m|[AP]M|m|g|s|h|L)"
    r"(?:\s+[A-Za-z]{2,}\.?)*)" + SQUARED
)
GLUED_UNIT = re.compile(rf"(?<=\d)(m(?=\^)|{SHORT}|km/h|m/s|mph)" + SQUARED)
REMARK = re.compile(r"(?<=[\d}])\s*\(\s*[A-Za-z]{2,}[A-Za-z ,.'/-]*\)\s*$")
ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*\{?\s*\\(?:text|mathrm)\s*\{(?:st|nd|rd|th)\}\s*\}?|st|nd|rd|th)\s*$")
MULTIPLIER = re.compile(
    rf"(?<!\d)(\d+(?:\.\d+)?)\s*(?:\\(?:text|mbox|mathrm)\s*\{{\s*)?\b({'|'.join(MULTIPLIERS)})s?\b\s*\}}?"
)
BASE = re.compile(r"^\(?\s*(?:\\text\{)?([0-9A-Za-z]+)\}?\s*\)?\s*_\s*\{?\s*(?:\\text\{)?\s*(\d+)\s*\}?\s*\}?$")
PLAIN = re.compile(r"^([-+]?)(\d+(?:\.\d*)?|\.\d+)$")
PLAIN_FRACTION = re.compile(r"^([-+]?)(?:(\d+)\s*/\s*(\d+)|\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})$")

UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimeters", "cm": "cm centimeter centimeters", "m": "m meter meters metre metres",
        "km": "km kilometer kilometers", "in": "in inch inches", "ft": "ft foot feet", "mi": "mi mile miles",
        "g": "g gram grams", "kg": "kg kilogram kilograms", "lb": "lb lbs pound pounds", "oz": "oz ounce ounces",
        "s": "s second seconds", "min": "min minute minutes", "h": "h hr hrs hour hours", "day": "day days",
        "am": "am AM a.m", "pm": "pm PM p.m", "week": "week weeks", "month": "month months", "year": "year years",
        "L": "L liter liters", "mL": "mL ml",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Units by name. Two answers that both name a unit must name the same one."""


@dataclass(frozen=True, slots=True)
class NormalizedText:
    """An answer's normalized text.

    percent: whether a percent sign was removed. base: base of a numeral such as 110_2. unit: one of UNITS, or empty.
    """

    text: str
    percent: bool = False
    base: int | None = None
    unit: str = ""

    @property
    def number(self) -> Fraction | None:
        """The value of a plain number or fraction, else None."""
        return plain_number(self.text)

    @property
    def brackets(self) -> str:
        """The opening bracket: "(", "[", or "{" if the braces enclose the whole text; else empty."""
        text = self.text.replace("\\left", "").replace("\\right", "").strip()
        first = text.removeprefix("\\")[:1]
        return first if first in ("(", "[") or (text.startswith("\\{") and _encloses(text.removeprefix("\\"))) else ""


def normalized(text: str) -> NormalizedText:
    """Normalize the text of a final answer."""
    text = FRACTION_NAMES.sub(r"\\frac", NEGATIVE_SPACE.sub("", text.translate(UNICODE)))
    text = _bare(SPACES.sub(" ", text))
    if (base := BASE.match(text)) and base[1][0].isdigit():
        return NormalizedText(base[1].upper().lstrip("0") or "0", base=int(base[2][:4]))
    text = REPEATING.sub(_repeating, text)
    text = MIXED.sub(lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}", text)
    text = MULTIPLIER.sub(_multiplied, text)
    text, percent = _without(PERCENT, text)
    text, unit = _without_unit(text)
    if not percent:
        text, percent = _without(PERCENT, text)
    text = _without(DEGREES, text)[0]
    text = CURRENCY.sub("", text).strip()
    text = _numbers(text)
    return NormalizedText(text, percent, unit=unit)


def rounded_equal(one: Any, other: Any) -> bool:
    """Whether two numbers, one of which may be rounded, agree to six decimals, or below 1 to six digits."""
    return bool(abs(one - other) * 10**6 <= min(1, max(abs(one), abs(other))))


def plain_equal(one: NormalizedText, other: NormalizedText) -> bool | None:
    """Whether two plain numbers are equal; None if either is not a plain number, or their percents or units differ."""
    a, b = one.number, other.number
    if a is None or b is None or (one.percent, one.base, one.unit) != (other.percent, other.base, other.unit):
        return None
    return rounded_equal(a, b) if "." in one.text + other.text else a == b


def plain_number(text: str) -> Fraction | None:
    """The value of digits with a decimal point, or of a fraction of two whole numbers; None for anything else."""
    if len(text) > 400:
        return None
    if found := PLAIN.match(text):
        return Fraction(found[1] + found[2])
    if found := PLAIN_FRACTION.match(text):
        above, below = found[2] or found[4], found[3] or found[5]
        return Fraction(int(found[1] + above), int(below)) if int(below) else None
    return None


def _bare(text: str) -> str:
    """The text without surrounding delimiters, styles and punctuation."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".,;:").strip()
        for opening, closing in DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            if len(text) > len(opening + closing) and text == opening + inner + closing and opening not in inner:
                text = inner
        text = text.removeprefix("\\displaystyle").removeprefix(":").strip()
        if text.startswith("{") and _encloses(text):
            text = text[1:-1]
        if found := STYLE.match(text):
            text = found[1] if any(c.isdigit() for c in found[1]) else text
    return text


def _without(pattern: re.Pattern[str], text: str) -> tuple[str, bool]:
    """The text before a match of the pattern, and True; the whole text and False if nothing else would be left."""
    found = pattern.search(text[-200:])
    if found is None or not (rest := text[: len(text) - len(found[0])].strip()) or rest == "-":
        return text, False
    return rest, True


def _without_unit(text: str) -> tuple[str, str]:
    """The text without a unit, an ordinal ending or a remark in brackets, and the unit if it is one of UNITS."""
    for pattern in (REMARK, ORDINAL, TEXT_UNIT, LONG_UNIT, GLUED_UNIT):
        found = pattern.search(text[-200:])
        if found is None or NO_UNIT.search(found[0]):
            continue
        rest = text[: len(text) - len(found[0])].strip()
        if any(c.isdigit() or c == "\\" for c in rest):
            name = found[1].split()[0].rstrip(".") if found.groups() and found[1] else ""
            return rest, UNITS.get(name, "")
    return text, ""


def _numbers(text: str) -> str:
    """The text without separators between thousands, and 1.5e3 as a product with a power of ten."""
    text = SPACED_THOUSANDS.sub(lambda found: SEPARATOR.sub("", found[0]), text)
    if not _enclosed(text):
        text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    if found := EXPONENT.match(text):
        text = rf"{found[1]} \times 10^{{{found[2]}}}"
    return text.strip()


def _repeating(found: re.Match[str]) -> str:
    """Writes 0.1\\overline{6} as a fraction."""
    whole, fixed, period = found[1] or "0", found[2], found[3]
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{above}}}{{{below}}}"


def _multiplied(found: re.Match[str]) -> str:
    """Writes 1.5 million in digits."""
    return f"{(Decimal(found[1]) * MULTIPLIERS[found[2]]).normalize():f}"


def _enclosed(text: str) -> bool:
    return any(c in text for c in "([{") and "," in text


def plus_minus(text: str) -> str:
    """Writes each element of a list that has a \\pm as two elements, with + and with -."""
    if "\\pm" not in text:
        return text
    elements = []
    for element in _split(text):
        if "\\pm" in element:
            elements += [
                element.replace("\\pm", "+").replace("\\mp", "-"),
                element.replace("\\pm", "-").replace("\\mp", "+"),
            ]
        else:
            elements.append(element)
    return ", ".join(elements)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _encloses(text: str) -> bool:
    """Whether the last character closes the first bracket."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False
