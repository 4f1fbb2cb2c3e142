"""Tables from local files or the hub, and what is wrong with them as one sentence."""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.hub import why_unreachable

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
OTHER_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
EMPTY = "it is empty; give data with at least one example"
MAX_DEPTH = 100
"""Nested lists and objects; deeper ones overflow the stack of code that walks through them."""
MAX_COLUMNS = 1000
QUOTED = 200
"""Characters of a value that an error quotes."""
TOO_DEEP = f"lists or objects inside of each other, more than {MAX_DEPTH} deep"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
BLANK = " \t\r\n"
"""JSON's whitespace."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns; where a JSON object has no such key, the row has None."""

    columns: list[str]
    rows: Sequence[Row]


def load_table(path: str, name: str | None, split: str, key: str = "task.path") -> Table:
    """The table at `path`: a file, a folder of files of one kind, or a name on the hub.

    Of a folder, the files that `split` begins the name of (`train.jsonl`, `train-00000-of-00002.parquet`); for
    `train`, where there are none, those that are not named after another split.
    Raises ConfigError, naming `key`, where it cannot be read or is empty.
    """
    local = Path(path).expanduser()
    table = _local(local, split, key) if local.exists() else _hub(path, name, split, key)
    if len(table.rows) == 0:
        raise ConfigError(EMPTY, key=key, value=path)
    return table


def looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as one, rather than as a name on the hub."""
    return path.startswith(("/", ".", "~")) or Path(path).suffix in READERS or path.count("/") > 1


def check_path(path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, where a local file or folder is not there. What may be on the hub passes."""
    if looks_local(path) and not Path(path).expanduser().exists():
        raise ConfigError("there is no such file or folder", key=key, value=path)


def files_at(path: Path, split: str, key: str) -> tuple[str, list[Path]]:
    """What the datasets library calls their kind, and the files of a folder, or the one that `path` is."""
    if not path.is_file() and not path.is_dir():
        raise ConfigError("is neither a file nor a folder", key=key, value=path)
    files = [path] if path.is_file() else _files_of(path, split, key)
    kinds = {READERS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({f.suffix or f.name for f in files})) or "none of them"
        raise ConfigError(f"needs files of one kind of {', '.join(READERS)}; found {found}", key=key, value=path)
    if kinds == {"csv"}:
        _check_headers(files, key)
    return cast(str, kinds.pop()), files


def _check_headers(files: Sequence[Path], key: str) -> None:
    """Raise ConfigError for a .csv whose header is wrong, or has other columns than those of the files before it."""
    first: set[str] = set()
    for file in files:
        _check_header(file, key)
        try:
            found = set(_header(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise unreadable(key, file, error) from error
        if found and first and found != first:
            differing = ", ".join(sorted(map(repr, found ^ first))[:5])
            problem = f"its columns are not those of {files[0].name}: they differ in {differing}"
            raise ConfigError(problem, key=key, value=file)
        first = first or found


def _check_header(file: Path, key: str) -> None:
    """Raise ConfigError for a .csv whose header is not separated by commas, names a column twice, or cannot be read."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            header = lines.readline()
            names = {one: next(csv.reader([header], delimiter=one), []) for one in (",", ";", "\t", "|")}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise unreadable(key, file, error) from error
    used = max(names, key=lambda one: len(names[one]))
    if len(names[","]) == 1 and used != ",":
        convert = f"import pandas; pandas.read_csv({str(file)!r}, sep={used!r}).to_csv('commas.csv', index=False)"
        problem = f"its columns are separated by {used!r}, and have to be by commas"
        raise ConfigError(f'{problem}; convert it with python -c "{convert}"', key=key, value=file)
    if (name := _repeated([name for name in names[","] if name])) is not None:
        raise ConfigError(f"line 1 has two columns called {name!r}; rename or remove one", key=key, value=file)


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs more than once."""
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)


def unreadable(key: str, path: str | Path, error: BaseException) -> ConfigError:
    """The error for a file that cannot be read. For text that is not UTF-8 it names the line and the remedy."""
    reason = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, UnicodeDecodeError):
        file = Path(path).expanduser()
        is_text = file.is_file() and file.suffix != ".parquet"
        utf16 = is_text and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        line = _not_utf8(file) if is_text and not utf16 else ""
        reason = f"{line}{reason}; it must be UTF-8" + (", and is UTF-16" if utf16 else "") + ": save it as UTF-8"
    return ConfigError(f"cannot be read: {reason}", key=key, value=path)


def _not_utf8(file: Path) -> str:
    """The line of a file's first bytes that are not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number}: "
    return ""


def _local(path: Path, split: str, key: str) -> Table:
    kind, files = files_at(path, split, key)
    try:
        return _json_table(files, key) if kind == "json" else _datasets_table(kind, files, key)
    except OSError as error:
        raise unreadable(key, path, error) from error


def _files_of(folder: Path, split: str, key: str) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in READERS)
    named = [file for file in files if _is_named(file, split)]
    if not named and split == "train":
        named = [file for file in files if not any(_is_named(file, other) for other in OTHER_SPLITS)]
    if files and not named:
        raise ConfigError(
            f"has no {split}.jsonl or other file of that name; found {', '.join(f.name for f in files)}",
            key=key,
            value=folder,
        )
    return named


def _is_named(file: Path, split: str) -> bool:
    return re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", file.name) is not None


def _json_table(files: Sequence[Path], key: str) -> Table:
    """By Python's own reader: the datasets library turns text that looks like a date into a date."""
    rows = [row for file in files for row in _json_rows(file, key)]
    columns = columns_of(rows, files[0], key)
    return Table(columns, [{column: row.get(column) for column in columns} for row in rows])


def columns_of(rows: Sequence[Row], path: str | Path, key: str) -> list[str]:
    """The columns of all rows. Raises ConfigError where there are too many: every row gets all of them."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
        if len(columns) > MAX_COLUMNS:
            problem = f"has more than {MAX_COLUMNS:,} columns; give rows that have the same ones"
            raise ConfigError(problem, key=key, value=path)
    return list(columns)


def short(value: Any) -> str:
    """A value, shortened to be quoted in an error."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]} ..."


def _json_rows(file: Path, key: str) -> list[Row]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(key, file, error) from error
    if text.lstrip().startswith("["):
        return [_object(row, file, number, key) for number, row in enumerate(_listed(text, file, key), 1)]
    lines = enumerate(text.split("\n"), 1)
    return [json_row(line, file, number, key) for number, line in lines if line.strip()]


def json_row(text: str, file: Path, line: int, key: str) -> Row:
    """The row on a line of a file."""
    text = text.strip(BLANK)
    row, end = _value(text, 0, file, key, line)
    if end < len(text):
        raise _not_json(file, key, line, "Extra data")
    return _object(row, file, line, key)


def _listed(text: str, file: Path, key: str) -> Iterator[Any]:
    """The values of a JSON list, one after the other, so that an error knows the line."""
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


def _object(row: Any, file: Path, number: int, key: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"example {number} is not an object with columns: {short(row)}", key=key, value=file)
    return row


def _value(text: str, at: int, file: Path, key: str, line: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at a place of the text, and where it ends. line: of the place, unless 0.

    Raises ConfigError for what is not JSON, and for JSON that is ambiguous or unusable.
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


def _not_json(file: Path, key: str, line: int, problem: str) -> ConfigError:
    return ConfigError(f"cannot be read: line {line} is not JSON ({problem}); repair or remove it", key=key, value=file)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"two values for {_repeated([name for name, _ in pairs])!r}")
    return row


DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _check_values(value: Any) -> None:
    """Raise ValueError for text with a lone surrogate, and for values that are nested too deep. Does not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for text in level:
            if isinstance(text, str) and not encodable(text):
                raise ValueError(f"half a character in {text[:40]!r} (a surrogate without the other one)")
        level = [
            one
            for node in level
            for one in ([*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else ())
        ]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def encodable(text: str) -> bool:
    """Whether a text has no lone surrogates, which can be neither written to a file nor tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _datasets_table(kind: str, files: Sequence[Path], key: str) -> Table:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    quiet_datasets()
    try:
        if all(file.stat().st_size == 0 for file in files):
            return Table([], [])
        table = load_dataset(kind, data_files=[str(f) for f in files], split="train", **reading(kind, files))
        table.data.validate(full=True)  # a .parquet may have text that is not UTF-8
    except (DatasetGenerationError, ValueError) as error:
        raise unreadable(key, files[0], error.__cause__ or error) from error
    return Table(list(table.column_names), table)


def reading(kind: str, files: Sequence[Path]) -> dict[str, Any]:
    """Options for the datasets library's reader.

    A .csv has no types: its cells are texts, and empty ones None. A guess would turn the answer 007 into 7, 1.50 into
    1.5, NA into nothing, and the last digits of large numbers into others.
    """
    if kind != "csv":
        return {}
    from datasets import Features, Value

    names = [name or f"Unnamed: {i}" for i, name in enumerate(_header(files[0]))]  # as pandas calls them
    return {
        "features": Features({name: Value("string") for name in names}),
        "keep_default_na": False,
        "na_values": [""],
    }


def _header(file: Path) -> list[str]:
    """The names of a .csv's columns; blank lines before them do not count."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        return next((row for row in csv.reader(lines) if row), [])


def quiet_datasets() -> None:
    """Turn off the library's progress bars and error messages: errors become sentences, and messages print the data."""
    from datasets import disable_progress_bars
    from datasets.utils.logging import CRITICAL, set_verbosity

    disable_progress_bars()
    set_verbosity(CRITICAL)


def _hub(path: str, name: str | None, split: str, key: str) -> Table:
    table = from_hub(path, name, split, key, streaming=False)
    return Table(list(table.column_names), table)


def from_hub(path: str, name: str | None, split: str, key: str, streaming: bool) -> Any:
    """A dataset of the hub. Raises ConfigError where it is not to be had."""
    check_path(path, key)
    unreachable = why_unreachable()  # before the library reads what that has found
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    quiet_datasets()
    try:
        return load_dataset(path, name, split=split, streaming=streaming)
    except (DatasetsError, OSError, ValueError) as error:
        reason = unreachable or " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"is no local file, and the hub did not give it: {reason}; check the name, or give a file",
            key=key,
            value=path,
        ) from error


def nothing_in(value: Any) -> str:
    """Why a value is no prompt or answer: it is `nothing`, `nan` or `inf`; empty if it is usable."""
    if value is None:
        return "nothing"
    if isinstance(value, list | dict):
        inside = value.values() if isinstance(value, dict) else value
        return next((found for one in inside if one is not None and (found := nothing_in(one))), "")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else ""


def need_columns(columns: Sequence[str], wanted: dict[str, str | None], path: str, otherwise: str = "") -> None:
    """Raise ConfigError unless each column of {config key: column} is one of `columns`. otherwise: what else may do."""
    for key, column in wanted.items():
        if column is not None and column not in columns:
            choices = f"{', '.join(columns)}{otherwise}{nearest(column, columns)}"
            raise ConfigError(f"choose one of the columns of {path}: {choices}", key=key, value=column)
