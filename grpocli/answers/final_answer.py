"""Finds the final answer in a completion: one rule for all rewards that check answers, and for majority voting.

The thinking part is ignored. In the rest, the answer is the content of the last \\boxed{}; else of the last <answer>
tag; else the text after the last "####" (GSM8K); else all of it, of which `math` takes the last expression.
Every function takes time linear in the length of a completion, even of a hostile one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from unicodedata import name, normalize

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
"""Words next to a number that change its value, or make it something else. Squared metres are a unit."""

NO_UNIT = re.compile(
    rf"{CHANGES.pattern}|{BEGIN}(?:and|or|to|if|than|is|are|was|{NUMERALS}|(?:{'|'.join(MULTIPLIERS)})s?){END}"
    rf"|{BEGIN}(?:wrong|false|incorrect|more|less|fewer|greater|larger|smaller|higher|lower|couple|score)\W*$",
    re.I,
)
"""Words that a unit or noun after a number does not contain: CHANGES, and words that join a second number."""

NEGATIVE = re.compile(
    r"(?<![\\A-Za-z])(?:\\text\s?\{\s?)?(?:negative|minus)\s?(?:\}\s?)?(?=\d|\.\d|\$|\\(?:d?frac|sqrt|pi))", re.I
)
"""A minus sign in words."""

THINK, THOUGHT = re.compile("<think>", re.I), re.compile("</think>", re.I)
TAG, END_TAG = re.compile("<answer>", re.I), re.compile("</answer>", re.I)
BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\s*(?P<open>\{)?(?P<bare>[A-Za-z0-9.]+)?|\\.|[{}]", re.DOTALL)
OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
GAP = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;!]|\\q?quad|\\text\{[^{}]*\b(?:and|or)\b[^{}]*\}|and|or|[A-Za-z]_?\{?\d?\}?\s*=)*"
)
LONG = re.compile(r"\n|[.!?:]\s+[A-Z][a-z]")
"""What a short text does not have."""
LONGEST = 2000
"""Characters at the end of a text that are searched for an expression."""

RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙₖ]+")
FULL_WIDTH = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]")
CJK = re.compile("(?<=[\u3400-\u9fff])(?=[^\\W\u3400-\u9fff]|[\\\\$-])|(?<=\\w)(?<![\u3400-\u9fff])(?=[\u3400-\u9fff])")
SIGNS = "×·⋅÷∞≤≥≠≈±∪∩∈∥∅…√", "times cdot cdot div infty le ge ne approx pm cup cap in parallel emptyset ldots sqrt"
UNICODE = str.maketrans(
    {
        **{sign: f"\\{command} " for sign, command in zip(SIGNS[0], SIGNS[1].split(), strict=True)},
        **{chr(c): f"\\{name(chr(c)).split()[-1].lower().replace('lamda', 'lambda')} " for c in range(0x3B1, 0x3CA)},
        **dict.fromkeys("\u00a0\u202f\u2009\u3000", " "), **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        **{sign: "\\frac{}{} ".format(*normalize("NFKC", sign).split("⁄")) for sign in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}, "⁄": "/",
        "∜": "\\sqrt[4] ", "−": "-", "–": "-", "∛": "\\sqrt[3] ", "°": "^\\circ ", "ℝ": "\\mathbb{R}",
        "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "：": ": ", "。": ".", "、": ",", "∨": " or ", "∧": " and ",
        "Ω": "\\Omega ", "′": "'", "″": "''",
    }
)  # fmt: skip

DOLLAR = re.compile(r"(?<!\\)\$|\\[()\[\]]")
STATED = re.compile(r"(?!.*\b(?:and|or)\b).*\b(?:is|are|equals|gives?|gets?|has|have|then)\b")
"""What between two formulas makes the second one the answer: the area of $ABC$ is $5$."""
FORMULAS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
COMMAND = re.compile(r"\\[A-Za-z]+")
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|operatorname)\s*\{[^{}]*\}")
COLOR = re.compile(r"\\(?:text)?color(?:box)?\s?(?:\[\w*\])?\s?\{[\w,.! ]{0,40}\}")
DIGIT = re.compile(r"[0-9]")
DIGIT_OR_COMMAND = re.compile(r"[0-9]|\\[A-Za-z]")
PROSE = re.compile(r"(?<![^\W\d_])[^\W\d_]{2,}[,;:]?\s+[^\W\d_]{2,}")
WORD = re.compile(r"[^\W\d_]{2,}")
JOINED = re.compile(r"\W*(?:and\s+)?(?:(?:an?|one)\s+)?")
STYLED = re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}|[$*_`]")
A_LETTER = r"([B-HJ]|I(?=[).:]|\s*$)|A(?!\s+(?!because|since|as|is|and|or)[a-z]))(?![\w'’+*/=^])"
CHOSEN = re.compile(
    r"(?:(?i:\b(?:answer|option|choice))|选)(?i:\s+is)?[\s:(]{0,5}(?:(?i:option|choice|is)\s)?[\s:(]{0,5}" + A_LETTER
)
LEADING = re.compile(r"\(?([A-J])(?=[).:]|\s*$)")
CHOICE = re.compile(
    r"(?:(?i:answer|option|choice)\s*:?\s*)?\(?([A-J])(?:\)?\.?|(?:\)[\s\\,]|[.:]\s)(?!.*\b[A-J]\s?[).:=])[\s\\,]*\S.*)"
)
"""A reference that is a choice."""
NAMED = r"(?:the |option |choice |answer |be )*\(?[A-J]\b\)?(?:(?:,|,? and|,? or) \(?[A-J]\b\)?)*"
REJECTED = re.compile(
    r"\b(?i:not|never|cannot|none of|eliminat\w+|rul\w+ out|reject\w*|exclud\w+|discard\w*|except|instead of"
    rf"|(?:any|all|every)[\w ]{{0,20}} but|(?:other|rather) than)(?: for)? {NAMED}|{NAMED} (?:(?:is|are|can|must|be) )*"
    r"(?:wrong|false|incorrect|impossible|eliminated|ruled out|rejected|excluded|fails?)\b"
)
"""Choices that are said to be no answer."""
LETTER = re.compile(r"(?<![\w'\\^.+*/=-])" + A_LETTER)
ANOTHER = re.compile(r"[).]?\s*(?:,|/|or\b|and\b)\s*\(?[A-J](?![\w'])")
NO_CHOICE = re.compile(r"[=+^/<>\\]|\b(?:not|no|never|wrong|incorrect|except|neither)\b|n't\b", re.I)
LISTED = re.compile(
    r"(?:^|\b(?:is|are|has|have|either) |: )((?:(?:[a-z] = )?[^\s,A-Za-z]+(?: [a-z]+)?(?:,? and|,? or|,) ?)+)$"
)
"""The earlier members of a list in a sentence: the numbers are 1, 2 and."""
MARKUP = "*_`\"'"
ENDINGS = ".,;:?!" + MARKUP


def depths(text: str) -> list[int]:
    """After each character, the number of brackets that are open."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))


def after_thinking(text: str) -> str:
    """The text without its thinking: what follows the last </think>, up to a <think> that is never closed.

    Chat templates may open the thinking part, so a </think> needs no <think> before it.
    """
    return THINK.split(THOUGHT.split(text)[-1], maxsplit=1)[0]


def boxed(text: str) -> str | None:
    """The content of the last closed \\boxed{} or \\fbox{}; None without a box. Of nested boxes the innermost counts.

    If the last box is empty, or is cut off after another box, the answer is empty.
    Boxes in a row, with only "and", "or", commas and the like between them, are one list.
    """
    found: list[str] = []
    before = 0
    for begin, end, content in _boxes(text):
        if not _joins(text, before, begin):
            found.clear()
        found.append(content)
        before = end
    if found and (not found[-1] or OPEN_BOX.search(text, before)):
        return ""
    return ", ".join(dict.fromkeys(found)) if found else None


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """The start, end and content of every closed innermost box, in one pass over the braces."""
    depth = 0
    begin, inside, level = 0, None, 0  # start of the open box, start of its content, depth around it
    for match in BRACES.finditer(text):
        if match["open"]:
            begin, inside, level = match.start(), match.start("open") + 1, depth
            depth += 1
        elif match["bare"]:
            yield match.start(), match.end(), match["bare"]
        elif match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if inside is not None and depth == level:
                yield begin, match.end(), text[inside : match.start()].strip()
                inside = None


def _joins(text: str, begin: int, end: int) -> bool:
    """Whether the text between two boxes or formulas makes them one list."""
    return end - begin <= 60 and GAP.fullmatch(text, begin, end) is not None


def marked(text: str) -> str | None:
    """The answer that a box, a tag or "####" marks; None without any of these. text: without the thinking part."""
    if (box := boxed(text)) is not None:
        return box
    if len(parts := TAG.split(text)) > 1:
        return END_TAG.split(parts[-1], maxsplit=1)[0].strip()  # </answer> may have been the stop string
    return text.rpartition("####")[2].strip() if "####" in text else None


def final_answer(text: str) -> str:
    """The final answer of a completion as text; without a mark, all text after the thinking part."""
    answer = marked(rest := after_thinking(text))
    return rest.strip() if answer is None else answer


def normalize_text(text: str) -> str:
    """The text in ASCII and LaTeX commands: 10⁸ as 10^{8}, √17 as \\sqrt{17}, usual marks and digits, no colors."""
    text = NEGATIVE.sub("-", COLOR.sub("", text))
    text = RAISED.sub(lambda found: f"^{{{normalize('NFKC', found[0])}}}", text)
    text = LOWERED.sub(lambda found: f"_{{{normalize('NFKC', found[0])}}}", text)
    return CJK.sub(" ", FULL_WIDTH.sub(lambda found: normalize("NFKC", found[0]), text.translate(UNICODE)))


def answer_expression(text: str) -> str:
    """The final answer of a completion as a mathematical expression; empty if there is none.

    What a box, a tag or "####" marks is the whole answer; without a mark, the last expression is.
    """
    answer = marked(rest := after_thinking(text))
    return last_expression(normalize_text(rest[-LONGEST:])) if answer is None else normalize_text(answer)


def reference_expression(text: str) -> str:
    """The answer in a reference: what `answer_expression` finds, or all of a short text without a mark."""
    rest = after_thinking(text).strip()
    short = len(rest) <= 200 and marked(rest) is None and not LONG.search(rest)
    formulas = _last_formulas(rest) if short else []
    before = _last_formula(rest[: formulas[0][0]]) if formulas else None
    several = before is not None and not STATED.match(rest, before[1], formulas[0][0])
    if not short or (formulas and not several):
        return answer_expression(text)
    return normalize_text(DOLLAR.sub("", rest) if several else rest)


def chosen_letter(text: str) -> str:
    """The letter A to J that answers a multiple-choice question; empty if the completion does not name one letter.

    It is the last letter after "answer is", "option" or the like; else the first of the answer, as in "(B) 42"; else
    the only letter in the last sentence.
    """
    answer = marked(rest := after_thinking(text))
    plain = REJECTED.sub("", STYLED.sub(r"\1", (rest if answer is None else answer)[-LONGEST:])).strip()
    found = next(reversed(list(CHOSEN.finditer(plain))), None) or LEADING.match(plain)
    if found:
        return "" if ANOTHER.match(plain, found.end(1)) else found[1]
    sentence = re.split(r"[.!?]\s|\n", plain.rstrip())[-1]
    letters = set(LETTER.findall(sentence))
    return letters.pop() if len(letters) == 1 and not NO_CHOICE.search(sentence) else ""


def choice(reference: str) -> str:
    """The letter of a reference to one of the choices A to J, as B, (B), Answer: B or (B) 42; else empty."""
    found = CHOICE.fullmatch(STYLED.sub(r"\1", final_answer(reference)).strip())
    return found[1] if found else ""


def last_expression(text: str) -> str:
    """The last mathematical expression in a text, which may be all of it; empty if there is none.

    An expression is a formula in dollars or brackets, or a run of numbers, operators, commands and single letters.
    """
    text = text.strip()
    formulas = _last_formulas(text)
    if not formulas:
        return _last_run(text) if _is_prose(text) else text
    start, end = formulas[0][0], formulas[-1][1]
    if not WORD.search(text[:start] + text[end:]):
        return text if len(formulas) == 1 else ", ".join(text[a:b] for a, b in formulas)
    return _last_run(text[end:]) or ", ".join(text[a:b] for a, b in formulas)


def _is_prose(text: str) -> bool:
    """Whether a text has several lines, words in a row, or a word before the first number, besides LaTeX commands."""
    plain = _without_commands(text)
    first = DIGIT.search(plain)
    return "\n" in text or bool(PROSE.search(plain)) or bool(first and WORD.search(plain, 0, first.start()))


def _without_commands(text: str) -> str:
    return COMMAND.sub("\\\\0", TEXT_COMMAND.sub("\\\\0", text))


def _last_formulas(text: str) -> list[tuple[int, int]]:
    """Start and end of the last closed formula and of those that make a list with it, as in $1$ and $2$.

    Delimiters are included. Empty without a formula.
    """
    plain = text.replace("\\$", "\\0")
    found: list[tuple[int, int]] = []
    before = len(text)
    while (one := _last_formula(plain[:before])) and (not found or _joins(text, one[1], before)):
        found.insert(0, one)
        before = one[0]
    return found


def _last_formula(text: str) -> tuple[int, int] | None:
    """Start and end of the last closed formula, delimiters included. Prose between two prices is not a formula."""
    best: tuple[int, int] | None = None
    for opening, closing in FORMULAS:
        end = text.rfind(closing)
        start = text.rfind(opening, 0, end) if end > 0 else -1
        inside = text[start + len(opening) : end].strip()
        if start < 0 or not inside or PROSE.search(_without_commands(inside)):  # $5 and then $6 are prices
            continue
        if best is None or end + len(closing) > best[1]:
            best = start, end + len(closing)
    return best


def _last_run(text: str) -> str:
    """The last run of words on one line that may be mathematics; empty if there is none."""
    for line in reversed(text.splitlines()):
        words = line.split()
        after: list[str] = []
        while words and not DIGIT_OR_COMMAND.search(words[-1]):
            after.append(words.pop())
        if not words:
            continue
        last = words.pop()
        run = [last.rstrip(ENDINGS)]  # from the last word to the first
        if after and after[-1].rstrip(ENDINGS) in (*MULTIPLIERS, "percent"):
            run.insert(0, after.pop().rstrip(ENDINGS))
        following = " ".join(reversed(after)) if run[-1] == last else ""
        while words and (depths(" ".join(run))[-1] < 0 or (words[-1][-1] not in ",;:.?!" and not _is_word(words[-1]))):
            run.append(words.pop())
        preceding = " ".join(words[-3:])
        if listed := LISTED.search(" ".join(words[-12:])):
            run.append(listed[1])
        while len(run) > 1 and run[-1] in ("-", "*", "=", "+"):  # a bullet, or an operator after a word
            run.pop()
        found = " ".join(reversed(run)).lstrip(MARKUP + "=")
        return "" if _changed(preceding, found, following) else found
    return ""


def _changed(before: str, number: str, after: str) -> bool:
    """Whether words right before or after a number change its value: "twice 5", "5 and a half"."""
    joined = JOINED.match(after)
    if CHANGES.match("0 " + after, 2 + (joined.end() if joined else 0)):
        return True
    found = CHANGES.finditer(f"{before} {number}")
    return any(one.end() <= len(before) and before[one.end() :].strip() in ("", "of", "by") for one in found)


def _is_word(token: str) -> bool:
    """Whether it is a word of a sentence, not a variable or a command."""
    return token in ("a", "A", "I") or WORD.search(COMMAND.sub("", token)) is not None
