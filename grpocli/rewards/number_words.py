"""The words beside a number that change its value: one table for boxes, sentences and units."""

from __future__ import annotations

import re

MULTIPLIERS = {
    "dozen": 12, "gross": 144, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7,
    "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15,
}  # fmt: skip
"""Words that multiply the number before them: 2.5 million is 2500000."""

NUMERALS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    "|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
)
PARTS = "third|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth"
OTHER_VALUE = (
    r"not|(?:is|are|was|were|does|did|ca|wo)n['\u2019]t|negative|plus|minus|over|mod|modulo|factorial"
    r"|half|halves|halved|double|doubled|triple|tripled|twice|thrice"
    r"|root|power|inverse|reciprocal|except|infinite|divided|multiplied|permille|per mille|per thousand|basis points?"
    rf"|at (?:least|most)|or (?:more|less|fewer)|(?:more|less|fewer|greater|larger|smaller) than(?=\W{{0,9}}\d)"
    rf"|(?:to|or|about|point|times|base) (?:{NUMERALS})|(?<=\d )(?:base|{PARTS})|(?:{PARTS})s"
)
BEGIN, END = r"(?<![\\A-Za-z])", r"(?![A-Za-z])"

CHANGES = re.compile(
    rf"{BEGIN}(?:(?:{OTHER_VALUE}){END}|(?<![A-Za-z] )(?:squared|cubed){END})|_\s?\\text\{{\s?(?:{NUMERALS})", re.I
)
"""A number beside one of these is another number, or no number. Squared metres are a unit."""

NO_UNIT = re.compile(
    rf"{CHANGES.pattern}|{BEGIN}(?:and|or|to|if|than|is|are|was|{NUMERALS}|(?:{'|'.join(MULTIPLIERS)})s?){END}"
    rf"|{BEGIN}(?:wrong|false|incorrect)\W*$",
    re.I,
)
"""Of a unit or a noun after a number none of these is a part, either: they join it to a second number."""

NEGATIVE = re.compile(
    r"(?<![\\A-Za-z])(?:\\text\s?\{\s?)?(?:negative|minus)\s?(?:\}\s?)?(?=\d|\.\d|\$|\\(?:d?frac|sqrt|pi))", re.I
)
"""A sign in words."""
