"""Rows of .jsonl and .json files: strict JSON, with the line of a bad value in the error.

Python's reader, because the reader of the datasets library turns text that looks like a date into a date.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError

MAX_DEPTH = 100
"""Levels of nested lists and objects; deeper ones overflow the stack of recursive code."""
QUOTED = 200
"""Characters of a value that an error quotes."""
TOO_DEEP = f"lists or objects nested more than {MAX_DEPTH} deep"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
BLANK = " \t\r\n"
"""JSON's whitespace."""

Row = dict[str, Any]


def read_json(file: Path, key: str) -> list[Row]:
    """The rows of a file with one JSON object per line, or with one JSON list of objects."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(key, file, error) from error
    if text.lstrip().startswith("["):
        return [_object(row, file, number, key) for number, row in enumerate(_listed(text, file, key), 1)]
    lines = enumerate(text.split("\n"), 1)
    return [json_row(line, file, number, key) for number, line in lines if line.strip()]


def dotted(row: Row, prefix: str = "") -> Row:
    """The values within the objects of a row, by names such as `reward_model.ground_truth`."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= dotted(value, f"{prefix}{name}.")
        elif prefix and value is not None:
            found[f"{prefix}{name}"] = value
    return found


def json_row(text: str, file: object, line: int, key: str) -> Row:
    """The row in one line of a .jsonl file."""
    text = text.strip(BLANK)
    row, end = _value(text, 0, file, key, line)
    if end < len(text):
        raise _not_json(file, key, line, "Extra data")
    return _object(row, file, line, key)


def _listed(text: str, file: Path, key: str) -> Iterator[Any]:
    """The values of a JSON list, decoded one by one, so that an error can name the line."""
    at = _after_blanks(text, text.index("[") + 1)
    going = text[at : at + 1] != "]"
    while going:
        row, at = _value(text, at, file, key)
        yield row
        at = _after_blanks(text, at)
        going = text[at : at + 1] == ","
        at = _after_blanks(text, at + 1) if going else at
    if text[at:].strip(BLANK) != "]":
        problem = "Extra data" if text[at : at + 1] == "]" else "Expecting ',' delimiter"
        raise _not_json(file, key, _line(text, at), problem)


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


def _line(text: str, at: int) -> int:
    return 1 + text.count("\n", 0, at)


def _object(row: Any, file: object, number: int, key: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"example {number} is not an object with columns: {short(row)}", key=key, value=file)
    return row


def _value(text: str, at: int, file: object, key: str, line: int = 0) -> tuple[Any, int]:
    """The JSON value at an offset of the text, and its end. line: the line of the offset; 0: found by counting.

    Raises ConfigError for text that is not JSON, and for JSON that is ambiguous or unusable.
    """
    try:
        value, end = DECODER.raw_decode(text, at)
        if SURROGATE.search(text, at, end) or text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH:
            _check_values(value)
    except json.JSONDecodeError as error:
        raise _not_json(file, key, line or error.lineno, error.msg) from error
    except (ValueError, RecursionError) as error:
        problem = TOO_DEEP if isinstance(error, RecursionError) else str(error)
        if "set_int_max_str_digits" in problem:
            problem = "an integer with thousands of digits"
        where = f"cannot be read: line {line or _line(text, at)} has"
        raise ConfigError(f"{where} {problem}; repair or remove it", key=key, value=file) from error
    return value, end


def _not_json(file: object, key: str, line: int, problem: str) -> ConfigError:
    return ConfigError(f"cannot be read: line {line} is not JSON ({problem}); repair or remove it", key=key, value=file)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"two values for {repeated([name for name, _ in pairs])!r}")
    return row


DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _check_values(value: Any) -> None:
    """Raise ValueError for text with a lone surrogate and for values nested too deep. Does not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for text in level:
            if isinstance(text, str) and not encodable(text):
                raise ValueError(f"a lone surrogate, half of a character, in {text[:40]!r}")
        level = [
            one
            for node in level
            for one in ([*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else ())
        ]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def encodable(text: str) -> bool:
    """Whether a text is free of lone surrogates, which can be neither written to a file nor tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    """A value as an error quotes it, shortened."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]} ..."


def unreadable(key: str, path: object, error: BaseException) -> ConfigError:
    """The error for a file that cannot be read. If it is not UTF-8, the error names the line and the remedy."""
    reason = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, UnicodeDecodeError):
        file = Path(str(path)).expanduser()
        is_text = file.is_file() and file.suffix != ".parquet"
        utf16 = is_text and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        line = _not_utf8(file) if is_text and not utf16 else ""
        reason = f"{line}{reason}; it must be UTF-8" + (", and is UTF-16" if utf16 else "") + ": save it as UTF-8"
    return ConfigError(f"cannot be read: {reason}", key=key, value=path)


def _not_utf8(file: Path) -> str:
    """`line N: ` for the first line of a file that is not UTF-8; empty if there is none."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number}: "
    return ""


def repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs more than once, or None."""
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)
