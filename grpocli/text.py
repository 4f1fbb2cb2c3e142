"""Text for terminals, logs and files: numbers, durations, untrusted text cleaned, secrets masked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from typing import Any

from grpocli.types import Message, Text

BARS = "▁▂▃▄▅▆▇█"
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
CREDENTIALS = re.compile(r"//(?P<secret>[^/@\s]*)@")
"""Matches the user and the password of an address."""
SHORTEST = 6
"""The shortest value that is masked, in characters: shorter ones occur in other words."""
_shown: dict[str, str] = {}


def escape_unprintable() -> None:
    """Print what standard output cannot encode as escapes, as standard error does: é in ASCII, of a folder josé."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def clean(text: str) -> str:
    """Text without escape sequences, control and direction characters, which a terminal would obey."""
    return CONTROLS.sub("", ESCAPES.sub("", text.replace("\r\n", "\n"))).expandtabs(4)


def one_line(text: str) -> str:
    """Cleaned text on one line."""
    return " ".join(clean(text).split())


def shorten(text: str, longest: int, counted: bool = False) -> str:
    """The first characters of a text, and `...` if there are more; counted: how many more, beyond `longest`."""
    more = len(text) - longest
    if more <= 0:
        return text
    return f"{text[:longest]}... ({more:,} more characters)" if counted else f"{text[: longest - 3]}..."


def format_number(value: Any) -> str:
    """A number in about six characters; `-` for None and NaN."""
    if value is None or value != value:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else one_line(str(value))
    size = abs(value)
    if size in (0, float("inf")):
        return f"{value:g}"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.1e}"
    digits = 0 if value.is_integer() or size >= 1000 else 1 if size >= 100 else 3
    return f"{value:,.{digits}f}"


def counted(n: int, what: str) -> str:
    """`1 step`, `2,000 steps` or `2 processes`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{n:,} {what if n == 1 else plural}"


def format_duration(seconds: float) -> str:
    """`42 s`, `3:05` or `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars in at most `width` characters, each the mean of the same number of values."""
    if not values or width < 1:
        return ""
    per = -(-len(values) // width)
    means = [sum(piece) / len(piece) for piece in (values[i : i + per] for i in range(0, len(values), per))]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * len(means)
    return "".join(BARS[int((m - low) / (high - low) * (len(BARS) - 1))] for m in means)


def trend(value: Any, before: Any) -> str:
    """An arrow for the change since the step before."""
    if not isinstance(value, int | float) or not isinstance(before, int | float):
        return " "
    return "↑" if value > before else "↓" if value < before else " "


def prompt_text(prompt: Text) -> str:
    """A prompt as text: a plain one, or the messages of a conversation with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {spoken(message)}" for message in prompt)


def spoken(message: Message) -> str:
    """The text of a message, with a line for each call of a tool: `-> NAME({"ARGUMENT": VALUE})`."""
    content = message.get("content") or ""
    calls = [call.get("function") for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    shown = (
        f"-> {one['name']}({json.dumps(one.get('arguments'), ensure_ascii=False, default=str)})"
        for one in calls
        if isinstance(one, dict) and "name" in one
    )
    return "\n".join(filter(None, [content if isinstance(content, str) else str(content), *shown]))


def mask(value: str, shown: str) -> None:
    """Have `masked` replace a value by `shown` from now on."""
    if len(value) >= SHORTEST:
        _shown[value] = shown


def masked(text: str) -> str:
    """A text in which each masked value is replaced."""
    return replaced(text, _shown)


def replaced(text: str, shown: Mapping[str, str], before: str = "", after: str = "") -> str:
    """A text with each value replaced by what is shown for it, the longest first.

    before, after: regular expressions of what must stand around a value.
    """
    values = "|".join(map(re.escape, sorted(shown, key=len, reverse=True)))
    return re.sub(f"{before}({values}){after}", lambda found: shown[found[0]], text) if values else text


def without_secrets(url: str) -> str:
    """An address without a password in it, and without the parameters that sign it."""
    return CREDENTIALS.sub("//", url).partition("?")[0]
