"""Writes an answer in one form, splits it into members, and separates a number from its unit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from grpocli.answers.final_answer import MULTIPLIERS, NO_UNIT, NUMERALS, depths

FUNCTIONS = "(?:arc)?(?:sin|cos|tan|cot|tg|ctg)|csc|cosec|cotg|sinh|cosh|tanh|ln|log|lg|exp|gcd|lcm"
COMMANDS = {
    "tg": "\\tan ", "ctg": "\\cot ", "cotg": "\\cot ", "arctg": "\\arctan ", "arcctg": "\\arccot ", "lg": "\\log_{10}",
    "varnothing": "\\emptyset ", "lbrace": "\\{", "rbrace": "\\}", "langle": "(", "rangle": ")",
    "leqslant": "\\le ", "leq": "\\le ", "geqslant": "\\ge ", "geq": "\\ge ", "neq": "\\ne ", "lt": "<", "gt": ">",
    "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "nicefrac": "\\frac", "sfrac": "\\frac", "xfrac": "\\frac",
    "dots": "\\ldots ", "cdots": "\\ldots ", "simeq": "\\approx ", "cong": "\\approx ", "doteq": "\\approx ",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "ast": "*", "imath": "i", "degree": "^\\circ ", "colon": ":",
    "lor": " or ", "vee": " or ", "land": " and ", "wedge": " and ", "euro": "€", "cosec": "\\csc ", "bot": "\\perp ",
    **dict.fromkeys(("displaystyle", "therefore", "limits", "rm", "bf", "it", "left", "right", "quad", "qquad"), " "),
    **dict.fromkeys(("left.", "right.", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg"), " "),
}  # fmt: skip
"""LaTeX commands that have another form here."""
COMMAND = re.compile(r"\\((?:left|right)\.|[A-Za-z]+)")
STYLE = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|normal)|[mh]box|operatorname\*?|boldsymbol|bm|emph"
    r"|underline|(?:vec|overrightarrow|hat)(?! ?\{ ?[A-Z]{2}))(?:\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?<![a-z]text)\s+([A-Za-z])(?![A-Za-z]))"
)
COUNT = r"(\{(?:\d+|[nkmr])\}|[\dnkmr])"
"""A number in combinations, C_5^2."""
FORMS = [
    (re.compile(pattern), form)
    for pattern, form in {
        r"(?<!\\)\\\\(?=(?:[dt]?frac|left|right|sqrt|text|mathbb|pi|infty|begin|end|le|ge|cup|cdot)\b)": r"\\",
        r"\\!\s*": "",
        r"(?<!\\)\\[,;:> ]|~": " ",
        r"\\%": "%",
        r"\bfor (?:any |all |every |some )?(positive )?integers? ([a-z])\b": r", \2 is \1integer",
        r"\bwhere\b|\bfor\b(?= [a-z] ?(?:\\in ?\\mathbb|(?:is )?(?:an? )?(?:positive )?integer))": ",",
        r"\(\s*([a-z]\s*\\in\s*\\mathbb[^()]*)\)": r", \1",
        rf"(?<![\\A-Za-z])({FUNCTIONS}|sqrt|pi|infty)(?![A-Za-z])": r"\\\1 ",
        r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])": r"\\infty ",
        r"\\surd(?![A-Za-z])": r"\\sqrt ",
        r"\\sqrt\s*(\[\d+\])?\s*\(((?:[^()]|\([^()]*\))*)\)": r"\\sqrt\1{\2}",
        r"\\sqrt(?:\s*(\[\d+\]))?\s+(\d+(?:\.\d+)?|[A-Za-z])(?![\d.])": r"\\sqrt\1{\2}",
        r"\\[dtc]?frac\s+(\d)\s*(\d)": r"\\frac{\1}{\2}",
        r"(?<![\d./])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d./])": r"\1\\frac{\2}{\3}",
        r"\{([.,])\}(?=\d)": r"\1",
        r"\\mu ?(?=[A-Za-z])": "micro",
        r"([kM]?)\\Omega": r" \1ohm ",
        r"\\(?:hspace|vspace|tag|label|[hv]?phantom)\*? ?\{[^{}]*\}": "",
        r"\\(max|min|gcd|lcm) ?\\\{([^{}]*)\\\}": r"\\\1(\2)",
        rf"(?:\{{\}} ?)?[_^]{COUNT} ?C_{COUNT}|(?<![A-Za-z])C_{COUNT}\^{COUNT}": r"\\binom{\1\3}{\2\4}",
        rf"(?:\{{\}} ?)?[_^]{COUNT} ?P_{COUNT}|(?<![A-Za-z])[AP]_{COUNT}\^{COUNT}": r"\\frac{\1\3!}{(\1\3-\2\4)!}",
        r"(?<=\d) ?\^ ?\{? ?(?:\\circ|o) ?\}?(?![\w{}])": r"^\\circ ",
        r"(?:\^\\circ|\bdegrees?) *(?:\\unit )?([CF])(?:elsius|ahrenheit)?\b": r" \\unit \1 ",
        r"\^\\circ *(\d+) ?'(?!')(?: ?(\d+) ?(?:''|\"))?": r" degrees, \1 arcminutes, 0\2 arcseconds",
        r"(?<=\d) ?o'clock": "",
        r"(?<=\d) ?(?:''|\")": " inches ",
        r"(?<=\d) ?'": " feet ",
        r"\((1|i)\) ?(?=.*\((?:2|ii)\))": "(a) ",
        r"[,;]? ?\((2|ii)\) ?(?=\$?-?(?:\d|\\frac|\\sqrt))": " (b) ",
        r"(?:^|[,;]? )(?:\(([a-e])|(?<!\()([a-e]))\) ?(?=\$?-?(?:\d|\\frac|\\sqrt))": r", \1\2=",
        r"(^|\\in|\\cup|=) ?\](?=[^\[\]()]+,[^\[\]()]+[\[\]])": r"\1(",
        r"([(\[][^\[\]()]+,[^\[\]()]+)\[(?=$|\$| |\\)": r"\1)",
        r"(?<![A-Za-z])\\?cis ?(\([^()]*\)|\d+\^\\circ)": r"(\\cos(\1)+i\\sin(\1))",
        r"\\left ?\\\{ ?\\begin\{array\}(?: ?\{[lcr|]*\})?(.*?)\\end\{array\} ?\\right ?\.": (
            r"\\begin{cases}\1\\end{cases}"
        ),
        r"(?<=[\w)}\]])\s*\*\*\s*(?=[\w({\\-])": "^",
        r"\.\.\.": r"\\ldots ",
        r"(?<=\d)\s*x\s*(?=10\s*\^)": r"\\times ",
        r"(?<=\d)( ?[a-z]+\.?) (?=\d+(?:\.\d+)? ?[a-z])": r"\1, ",
    }.items()
]
"""Patterns that have another form here, in this order."""
PHRASES = [
    (re.compile(pattern, re.I), form)
    for pattern, form in {
        r"^no (?:real )?(?:solutions?|roots?)$|^(?:the )?empty set$|^无解$": r"\\emptyset",
        r"^infinite(?:ly many)?(?: (?:real )?(?:solutions|roots))?$": "infinitely many",
        r"^no ([a-z]+ (?:solution|root))$": r"no \1s",
        r"^(\$\$|\$|\*\*|`)((?:(?!\1).)+)\1$": r"\2",
        r"^all real numbers$": r"\\mathbb{R}",
        r"^(?:an?|the) (?=[a-z]{3})(?!and\b)|^\([A-J]\) (?=\d|\\frac|\\sqrt)|^(?:option|choice) (?=\(?[A-J]\)?$)"
        r"|^\\(?:implies|Rightarrow|because|sim) |^(?:if|when) |^(?:f ?\(x\)|y) ?= ?(?=\\begin\{cases)": "",
        r"^([ABD-Z]) ?(?=\([^()]*[,;])": r"\1=",
        r"^DNE$": "does not exist",
        r"^(\d+) (?:out of|in) (\d+)$": r"\\frac{\1}{\2}",
        r"^(\d+) to (\d+)$": r"\1:\2",
        r"^([a-z]) (?:is|equals) (?=[^a-z]|[a-z]$)": r"\1=",
    }.items()
]
"""Members in words that have another form here."""
SYSTEM = re.compile(r"\\begin\{(cases|(?:aligned|align|gathered|gather|split)\*?)\}(.*?)\\end\{\1\}", re.DOTALL)
LEAD = re.compile(
    r"^(?:(?:so|thus|therefore|hence|finally|then|exactly|precisely|only|just|simply|about|approximately|roughly|around"
    r"|(?:the )?ratio(?: of)?|we (?:get|have))[ ,:]+|(?:[a-z']+ ){0,12}(?:ans|answers?|solutions?|result|total|sum) ?:"
    r"|(?:[a-z']{2,} |a ){0,12}(?:is|are|equals|has|have|takes?|costs?)(?: equal to)?[ :](?!not\b))\s*(?=\S)",
    re.I,
)
"""Words before an answer that are no part of it."""
SPLIT = re.compile(r"\\begin|\\end|[([{)\]},;:]|(?<![<>!:])=|\\approx(?![a-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
NUMERAL = re.compile(
    rf"^(?:([a-z]+ty)[- ])?({NUMERALS})(?=$| (?!quarter))|(?<=_)(?:\{{ ?)?()({NUMERALS})(?: ?\}})?$", re.I
)
"""A number in words, or the base of a numeral."""
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:\s\d{3})+(?![\d,])")
EXPONENT = re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)$")
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*\b(?:percent(?:age)?|per cent|pct)\b\.?)\s*$")
DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?)\s*$")
PRICE = re.compile(r"^([-+]?)\s*(\\?[$€£¥₹]|US\\?\$|Rs\.?|USD)\s*(?=[-\d.])|(?<=[\d}])\s*(\\?[$€£¥₹])\s*$")
SQUARED = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
NAME = re.compile(r"(?:\\(?:triangle|angle|Delta)|[A-Za-z]\^\{?\d+\}?)$")
"""What is followed by a letter of its own, not by a unit: r^2 h."""
REMARK = re.compile(r"(?<=[\d}])\s*\(\s*([A-Za-z]{2,}[A-Za-z ,.'/-]*)\)\s*$")
ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*\{?\s*)?(?:st|nd|rd|th)\s*\}?\s*()$")
MULTIPLIER = re.compile(rf"(?<!\d)(\d+(?:\.\d+)?)\s*\b({'|'.join(MULTIPLIERS)})s?\b")
BASE = re.compile(r"^\(?\s*([0-9A-Za-z]+)\s*\)?\s*_\s*\{?\s*(\d+)\s*\}?$")
HEXADECIMAL = re.compile(r"[A-F]+\d[\dA-F]*")
PLAIN = re.compile(r"^[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)$")
PLAIN_FRACTION = re.compile(r"^([-+]?)(?:(\d+)\s*/\s*(\d+)|\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})$")

METRIC = {
    "m meter metre": "1", "g gram": "1", "s sec second": "1", "A ampere amp": "1", "K kelvin": "1", "mol mole": "1",
    "N newton": "1000 g m/s^2", "J joule": "1 N m", "W watt": "1 J/s", "Wh": "3600 J", "Pa pascal": "1 N/m^2",
    "Hz hertz": "1 /s", "V volt": "1 W/A", "ohm": "1 V/A", "L l liter litre": "0.001 m^3", "T tesla": "1 V s/m^2",
    "coulomb": "1 A s", "farad": "1 A s/V", "henry": "1 V s/A", "eV": "1.602176634E-19 J",
    "cal calorie": "4.184 J", "bar": "100000 Pa",
}  # fmt: skip
"""Units that take prefixes, each with its size in other units; 1 alone for a base unit."""
UNITS = METRIC | {
    "in inch inche": "0.0254 m", "ft foot feet": "0.3048 m", "yd yard": "0.9144 m", "mi mile": "1609.344 m",
    "acre": "4046.8564224 m^2", "ha hectare": "10000 m^2", "quart": "0.946352946 L", "gallon": "3.785411784 L",
    "oz ounce": "28.349523125 g", "lb pound £ GBP": "453.59237 g", "ton tonne": "1000000 g", "mph": "1 mi/h",
    "min minute": "60 s", "h hr hour": "3600 s", "day": "86400 s", "week": "604800 s", "month": "1", "year": "12 month",
    "degree": "1", "arcminute": "1/60 degree", "arcsecond": "1/3600 degree", "dollar $ USD US$": "1",
    "cent": "0.01 dollar", "rupee Rs ₹": "1", "euro € EUR": "1", "yen yuan ¥": "1",
    "atm atmosphere": "101325 Pa", "psi": "6894.757293168 Pa", "mmHg torr": "133.322387415 Pa", "knot": "463/900 m/s",
    "pint": "0.473176473 L", "radian rad": "1",
    **dict.fromkeys(("franc", "peso", "am", "pm", "C", "F"), "1"),
}  # fmt: skip
PREFIXES = {"k": 3, "kilo": 3, "c": -2, "centi": -2, "d": -1, "deci": -1, "m": -3, "milli": -3, "micro": -6, "n": -9,
            "nano": -9, "M": 6, "mega": 6, "G": 9, "giga": 9}  # fmt: skip
SIZES = {
    prefix + name: f"1E{power} {name}"
    for names in METRIC
    for name in names.split()
    for prefix, power in PREFIXES.items()
} | {
    name: size if name == names.split()[0] else f"1 {names.split()[0]}"
    for names, size in UNITS.items()
    for name in names.split()
}
"""The size of each unit, by name."""
SPACED = "|".join(name for name in SIZES if len(name) < 3 and name not in ("C", "F", "in", "kT"))
SHORT = (
    "mm|cm|dm|km|kg|mg|k[JWNV]|[kM]?Hz|[kM]?Pa|mA|Wh|eV|ft|yd|mi|lbs?|oz"
    "|hrs?|sec|min|mL|[cdkm]l|mph|rad|sq|cu|[ap]\\.?m\\.?|[AP]M|m|g|s|h|L"
)
WORD = r"[A-Za-z\u4e00-\u9fff]"
FIRST = (
    rf"(?:{WORD}{{3,}}\.?|[\u4e00-\u9fff]+|\\unit [A-Za-z]+|(?:{SHORT})\.?"
    rf"|(?:(?<=[\d}}] )|(?<=[\d}}]))in|(?<= )(?:{SPACED}))(?![A-Za-z]){SQUARED}"
)
UNIT = re.compile(
    rf"(?:(?<=[\d}})|])|(?<=\\pi)|(?<=[a-z])\s)\s*({FIRST}(?:\s*(?:/|\\cdot|\s)\s*{WORD}+\.?{SQUARED})*"
    rf"|\\frac\s*\{{[a-z ]+\}}\s*\{{[a-z ]+{SQUARED}\}})\s*$"
)
UNKNOWN = re.compile(rf"(?!\s*(?:{SHORT}|or|in|by|to|of|at|[ei])\s*$)\s*[A-Za-z]{{1,2}}\s*")
SQUARED_WORDS = re.compile(r"\b(?:square|sq|cubic|cu)\.? ([A-Za-z]+)|([A-Za-z]+) (?:squared|cubed)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """The text of a number or an expression, without its unit.

    percent: whether a percent sign was removed. base: base of a numeral such as 110_2. noun: the words after it.
    unit: size and powers of the kinds of a known unit, as 1/3600 and (length, 1), (time, -1); else None.
    is_sum: whether it is a sum of quantities, as 2 hours and 30 minutes.
    """

    text: str
    percent: bool = False
    base: int | None = None
    noun: str = ""
    unit: tuple[Fraction, tuple[tuple[str, int], ...]] | None = None
    is_sum: bool = False


def canonical(text: str) -> str:
    """The whole answer in one form, without delimiters, styles and words before it."""
    before = None
    while text != before:
        before, text = text, re.sub(r"\s+", " ", STYLE.sub(_unstyled, text))
    for pattern, form in FORMS:
        text = pattern.sub(form, text)
    return bare(SYSTEM.sub(_lines, COMMAND.sub(lambda found: COMMANDS.get(found[1], found[0]), text)))


def bare(text: str) -> str:
    """An answer or a member of it without delimiters, punctuation and words such as "the answer is"."""
    before = None
    while text != before:
        before, text = text, re.sub(r"\s+", " ", text).strip().rstrip(".,;:\\").removeprefix(":").strip()
        if text.startswith("{") and encloses(text):
            text = text[1:-1]
        for pattern, form in PHRASES:
            text = pattern.sub(form, text)
        text = NUMERAL.sub(_numeral, LEAD.sub("", text))
    return text


def quantity(text: str) -> Quantity:
    """Separate a member of an answer into its text and its unit."""
    if (base := BASE.match(text)) and (base[1][0].isdigit() or HEXADECIMAL.fullmatch(base[1])):
        return Quantity(base[1].upper().lstrip("0") or "0", base=int(base[2][:4]))
    text = REPEATING.sub(_repeating, text)
    text = MULTIPLIER.sub(lambda found: f"{(Decimal(found[1]) * MULTIPLIERS[found[2]]).normalize():f}", text)
    text, percent = _without(PERCENT, text)
    noun = ""
    for pattern in (REMARK, ORDINAL, UNIT):
        rest, found = _without(pattern, text)
        if found and not NO_UNIT.search(found[0]) and re.search(r"[\d\\]|^[b-z]$", rest) and not NAME.search(rest):
            text, noun = rest, found[1].strip()
            break
    unit = _unit(noun)
    rest, degrees = _without(DEGREES, text)
    if degrees and not re.search(FUNCTIONS, rest):
        text, unit = rest, _unit("degree")
    if (price := PRICE.search(text)) and len(price[0]) < len(text):
        text, unit = PRICE.sub(r"\1", text), unit or _unit((price[2] or price[3]).replace("\\", ""))
    text = SPACED_THOUSANDS.sub(lambda found: re.sub(r"\s", "", found[0]), text)
    text = EXPONENT.sub(r"\1 \\times 10^{\2}", text).strip()
    return Quantity(text, bool(percent), noun=noun, unit=None if percent else unit)


def rounded_equal(one: Any, other: Any) -> bool:
    """Whether two numbers, one of which may be rounded, agree to six decimals, or below 1 to six digits."""
    return bool(abs(one - other) * 10**6 <= min(1, max(abs(one), abs(other))))


def plain_number(text: str) -> Fraction | None:
    """The value of digits with commas or a decimal point, or of a fraction of whole numbers; None for anything else."""
    if len(text) > 400:
        return None
    if PLAIN.match(text):
        return Fraction(text.replace(",", ""))
    if found := PLAIN_FRACTION.match(text):
        above, below = found[2] or found[4], found[3] or found[5]
        return Fraction(int(found[1] + above), int(below)) if int(below) else None
    return None


def separate(text: str, *separators: str) -> list[str]:
    """Split at separators outside of brackets: "," ";" "=" ":" "and" "or" or "\\approx"."""
    parts, depth, start = [], 0, 0
    for found in SPLIT.finditer(text):
        token = found[0]
        if token in ("(", "[", "{", "\\begin"):
            depth += 1
        elif token in (")", "]", "}", "\\end"):
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


def encloses(text: str) -> bool:
    """Whether the last character closes the first bracket."""
    return 0 not in depths(text)[:-1] and text[-1:] in (")", "]", "}")


def _unstyled(found: re.Match[str]) -> str:
    """The content of a style command. A letter or two after a number stay marked, except K and M right after it."""
    inner, before = str(found[1] or found[2] or ""), found.string[: found.start()]
    if found[0].startswith(("\\text", "\\mathrm")) and UNKNOWN.fullmatch(inner) and re.search(r"[\d})]\s*$", before):
        return inner if inner in "KMkB" and before[-1].isdigit() else f" \\unit {inner.strip()} "
    return f" {inner} " if any(c.isalpha() for c in inner) else inner


def _numeral(found: re.Match[str]) -> str:
    names = NUMERALS.split("|")
    at = [names.index(word.lower()) for word in found.groups() if word]
    return str(sum(i if i < 20 else 10 * i - 180 for i in at))


def _lines(found: re.Match[str]) -> str:
    """A system of equations as a list; a function in pieces unchanged."""
    if found[1] == "cases" and "&" in found[2]:
        return found[0]
    return found[2].replace("&", "").replace("\\\\", ",")


def _without(pattern: re.Pattern[str], text: str) -> tuple[str, re.Match[str] | None]:
    """The text before a match of the pattern, and the match; the whole text and None if nothing else would be left."""
    found = pattern.search(text[-200:])
    if found is None or not (rest := text[: len(text) - len(found[0])].strip()) or rest == "-":
        return text, None
    return rest, found


@cache
def _unit(text: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """Size and powers of the base units of a unit such as km/h or square feet; None if it is not known."""
    size, powers, sign = Fraction(1), Counter[str](), 1
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{(.*)\}", r"\1/\2", text)
    text = SQUARED_WORDS.sub(lambda found: f"{found[1] or found[2]}^{2 if 'sq' in found[0] else 3}", text)
    for word, exponent in re.findall(r"((?<!\\)(?<![A-Za-z])[A-Za-z.$€£¥₹]+|/)(?:\s*\^\s*\{?\s*(-?\d))?", text):
        name = word.replace(".", "")
        if name in ("/", "per"):
            sign = -1
        elif known := _known(name):
            number, _, parts = SIZES[known].partition(" ")
            inner = _unit(parts) if parts else None
            power = sign * int(exponent or 1)
            size *= (Fraction(number or 1) * (inner[0] if inner else 1)) ** power
            for kind, one in inner[1] if inner else ((known, 1),):
                powers[kind] += power * one
    return (size, tuple(sorted((kind, power) for kind, power in powers.items() if power))) if powers else None


def _known(name: str) -> str | None:
    """The name of a unit in the table, which may be written in capitals or in the plural."""
    return next((one for one in (name, name.lower(), name.lower().removesuffix("s")) if one in SIZES), None)


def _repeating(found: re.Match[str]) -> str:
    """Writes 0.1\\overline{6} as a fraction."""
    whole, fixed, period = found[1] or "0", found[2], found[3]
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{above}}}{{{below}}}"
