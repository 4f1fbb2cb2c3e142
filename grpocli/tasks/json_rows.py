"""Rows of .jsonl and .json files: strict JSON, with the line of a bad value in the error.

Python's reader, because the reader of the datasets library turns text that looks like a date into a date.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError

QUOTED = 200
"""Characters of a value that an error quotes."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Row = dict[str, Any]


def read_json(file: Path, key: str) -> list[Row]:
    """The rows of a file with one JSON object per line, or with one JSON list of objects."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(key, file, error) from error
    if text.lstrip().startswith("["):
        return [_object(row, file, number, key) for number, row in enumerate(_value(text, file, key), 1)]
    lines = enumerate(text.split("\n"), 1)
    return [json_row(line, file, number, key) for number, line in lines if line.strip()]


def dotted(row: Row, prefix: str = "") -> Row:
    """The values within the objects of a row, by names such as `reward_model.ground_truth`."""
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= dotted(value, f"{prefix}{name}.")
        elif prefix:
            found[f"{prefix}{name}"] = value
    return found


def json_row(text: str, file: object, line: int, key: str) -> Row:
    """The row in one line of a .jsonl file."""
    return _object(_value(text, file, key, line), file, line, key)


def _object(row: Any, file: object, number: int, key: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"example {number} is not an object with columns: {short(row)}", key=key, value=file)
    return row


def _value(text: str, file: object, key: str, line: int = 0) -> Any:
    """The value of a JSON text. line: that of the text; 0: it is the whole file.

    Raises ConfigError for text that is not JSON, or that has half of a character, which can be neither written to a
    file nor tokenised.
    """
    try:
        value = json.loads(text)
        if not SURROGATE.search(text) or encodable(json.dumps(value, ensure_ascii=False)):
            return value
        problem = "has a lone surrogate, half of a character"
    except (ValueError, RecursionError) as error:
        line = line or getattr(error, "lineno", 0)
        problem = f"is not JSON ({getattr(error, 'msg', error)})"
    raise ConfigError(
        f"cannot be read: {f'line {line}' if line else 'it'} {problem}; repair or remove it", key=key, value=file
    )


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
    """The error for a file that cannot be read, with the remedy if it is not UTF-8."""
    reason = " ".join(str(error).split()).rstrip(".")
    remedy = "; it must be UTF-8: save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
    return ConfigError(f"cannot be read: {reason}{remedy}", key=key, value=path)
