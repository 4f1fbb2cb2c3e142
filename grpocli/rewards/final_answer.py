"""Where a completion's final answer stands: one rule for all rewards that judge answers, and for majorities.

A thinking part holds no answer. In the rest, the answer is what is in the last \\boxed{}; else in the last <answer>
tag; else what follows the last "####" (GSM8K); else all of it, of which mathematics takes the last expression.
Every function takes time linear in the text, whatever a model has written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

THINK, THOUGHT = "<think>", "</think>"
TAG, END_TAG = "<answer>", "</answer>"
HASHES = "####"
BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\s*(?P<open>\{)?(?P<bare>[A-Za-z0-9.]+)?|\\.|[{}]", re.DOTALL)
GAP = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;!]|\\q?quad|\\text\{[^{}]*\b(?:and|or)\b[^{}]*\}|and|or|[A-Za-z]_?\{?\d?\}?\s*=)*"
)
"""The text between two boxes or formulas that are one list."""
LONGEST_GAP = 60
"""Characters of such a text."""
LONGEST = 2000
"""Characters at the end of a text that are searched for an expression."""

MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
FORMULAS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
COMMAND = re.compile(r"\\[A-Za-z]+")
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|operatorname)\s*\{[^{}]*\}")
DIGIT = re.compile(r"[0-9]")
DIGIT_OR_COMMAND = re.compile(r"[0-9]|\\[A-Za-z]")
PROSE = re.compile(r"[^\W\d_]{2,}[,;:]?\s+[^\W\d_]{2,}")
WORD = re.compile(r"[^\W\d_]{2,}")
NUMERALS = "one|two|three|four|five|six|seven|eight|nine|ten"
MEANING = re.compile(
    rf"\b(?:not|minus|plus|factorial|base|(?:at|or) (?:least|most|more|less)|(?:to|or) (?:{NUMERALS}))\b"
    r"|\b(?:fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s\b"
    rf"|_\s*\\text\{{\s*(?:{NUMERALS})"
)
"""Words in a box with a number that change its value, or give a second one."""
MARKUP = "*_`\"'"
ENDINGS = ".,;:?!" + MARKUP


def after_thinking(text: str) -> str:
    """The text without its thinking: what follows the last </think>, up to a <think> that is never closed.

    Chat templates may open the thinking part, so a </think> needs no <think> before it.
    """
    return text.rpartition(THOUGHT)[2].partition(THINK)[0]


def boxed(text: str) -> str | None:
    """The contents of the last closed \\boxed{} or \\fbox{}; None without one. Of nested ones the innermost counts.

    An empty last box, and one that is cut off after another, are an empty answer.
    Boxes in a row, with nothing but "and", "or", commas and the like between them, are one list.
    """
    found: list[str] = []
    before = 0
    for begin, end, content in _boxes(text):
        if not _joins(text, before, begin):
            found.clear()
        found.append(content)
        before = end
    if found and (not found[-1] or _cut_off(text, before)):
        return ""
    return ", ".join(dict.fromkeys(found)) if found else None


def _cut_off(text: str, begin: int) -> bool:
    """Whether a box opens after `begin`, where the last closed one ends, and never closes."""
    return re.compile(r"\\(?:boxed|fbox)\s*\{").search(text, begin) is not None


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """The start, end and content of every closed box that has no box inside, in one pass over the braces."""
    depth = 0
    begin, inside, level = 0, None, 0  # of the box that is open: its start, its content's start, the depth around it
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
    """Whether the text between two boxes or formulas makes them one list: "and", commas and the like."""
    return end - begin <= LONGEST_GAP and GAP.fullmatch(text, begin, end) is not None


def marked(text: str) -> str | None:
    """The answer that a box, a tag or "####" marks; None without one of them. text: without its thinking."""
    if (box := boxed(text)) is not None:
        return box
    if TAG in text:
        return text.rpartition(TAG)[2].partition(END_TAG)[0].strip()  # </answer> may have been the stop string
    if HASHES in text:
        return text.rpartition(HASHES)[2].strip()
    return None


def final_answer(text: str) -> str:
    """The final answer of a completion as text; without a mark, all that follows its thinking."""
    rest = after_thinking(text)
    answer = marked(rest)
    return rest.strip() if answer is None else answer


def answer_expression(text: str) -> str:
    """The final answer of a completion as mathematics reads it: an expression, or empty."""
    rest = after_thinking(text)
    answer = marked(rest)
    if answer and MEANING.search(answer) and DIGIT.search(answer) and answer == boxed(rest):
        return ""
    return last_expression(rest if answer is None else answer)


def last_expression(text: str) -> str:
    """The last mathematical expression in a text; the whole text where it is one; empty where there is none.

    It is a formula in dollars or brackets, or a run of numbers, operators, commands and single letters.
    """
    text = text.strip()[-LONGEST:]
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
    """Start and end of the last closed formula, delimiters included, after those that make a list with it: $1$ and $2$.

    Empty without a formula.
    """
    plain = text.replace("\\$", "\\0")
    found: list[tuple[int, int]] = []
    before = len(text)
    while (one := _last_formula(plain[:before])) and (not found or _joins(text, one[1], before)):
        found.insert(0, one)
        before = one[0]
    return found


def _last_formula(text: str) -> tuple[int, int] | None:
    """Start and end of the last closed formula, delimiters included; prose between two prices is none."""
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
    """The last run of words that may be mathematics, on one line; empty without one."""
    for line in reversed(text.splitlines()):
        words = line.split()
        after = ""
        while words and not DIGIT_OR_COMMAND.search(words[-1]):
            after = words.pop().rstrip(ENDINGS)
        if not words:
            continue
        run = [words.pop().rstrip(ENDINGS)]  # from the last word to the first
        if after in MULTIPLIERS:
            run.insert(0, after)
        open_brackets = _closing(run[-1])
        while words and (open_brackets > 0 or (words[-1][-1] not in ",;:.?!" and not _is_word(words[-1]))):
            run.append(words.pop())
            open_brackets += _closing(run[-1])
        while len(run) > 1 and run[-1] in ("-", "*", "=", "+"):  # a bullet, or what follows a word
            run.pop()
        return " ".join(reversed(run)).lstrip(MARKUP + "=")
    return ""


def _closing(token: str) -> int:
    """How many more brackets it closes than it opens."""
    return sum((c in ")]}") - (c in "([{") for c in token)


def _is_word(token: str) -> bool:
    """Whether it is a word of a sentence, and no variable or command."""
    return token in ("a", "A", "I") or WORD.search(COMMAND.sub("", token)) is not None
