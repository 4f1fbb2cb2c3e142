"""Tables from local files or the hub, and what is wrong with them as one sentence."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.hub import why_unreachable

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
OTHER_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
EMPTY = "it is empty; give data with at least one example"

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
        raise ConfigError.of(key, path, EMPTY)
    return table


def looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as one, rather than as a name on the hub."""
    return path.startswith(("/", ".", "~")) or Path(path).suffix in READERS or path.count("/") > 1


def check_path(path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, where a local file or folder is not there. What may be on the hub passes."""
    if looks_local(path) and not Path(path).expanduser().exists():
        raise ConfigError.of(key, path, "there is no such file or folder")


def files_at(path: Path, split: str, key: str) -> tuple[str, list[Path]]:
    """What the datasets library calls their kind, and the files of a folder, or the one that `path` is."""
    files = [path] if path.is_file() else _files_of(path, split, key)
    kinds = {READERS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({f.suffix or f.name for f in files})) or "none of them"
        raise ConfigError.of(key, path, f"needs files of one kind of {', '.join(READERS)}; found {found}")
    for file in files if kinds == {"csv"} else ():
        _check_separator(file, key)
    return cast(str, kinds.pop()), files


def _check_separator(file: Path, key: str) -> None:
    """Raise ConfigError for a .csv whose header is separated by something else than commas, or cannot be read."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            header = lines.readline()
            names = {one: next(csv.reader([header], delimiter=one), []) for one in (",", ";", "\t", "|")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(key, file, f"cannot be read: {why(error)}") from error
    used = max(names, key=lambda one: len(names[one]))
    if len(names[","]) == 1 and used != ",":
        convert = f"import pandas; pandas.read_csv({str(file)!r}, sep={used!r}).to_csv('commas.csv', index=False)"
        problem = f"its columns are separated by {used!r}, and have to be by commas"
        raise ConfigError.of(key, file, f'{problem}; convert it with python -c "{convert}"')


def why(error: BaseException) -> str:
    """Why a file cannot be read, and of text that is not UTF-8 what to do."""
    reason = " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, UnicodeDecodeError):
        return reason
    utf16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return f"{reason}; it must be UTF-8" + (", and is UTF-16" if utf16 else "") + ": save it as UTF-8"


def _local(path: Path, split: str, key: str) -> Table:
    kind, files = files_at(path, split, key)
    try:
        return _json_table(files, key) if kind == "json" else _datasets_table(kind, files, key)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(key, path, f"cannot be read: {why(error)}") from error


def _files_of(folder: Path, split: str, key: str) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in READERS)
    named = [file for file in files if _is_named(file, split)]
    if not named and split == "train":
        named = [file for file in files if not any(_is_named(file, other) for other in OTHER_SPLITS)]
    if files and not named:
        raise ConfigError.of(
            key, folder, f"has no {split}.jsonl or other file of that name; found {', '.join(f.name for f in files)}"
        )
    return named


def _is_named(file: Path, split: str) -> bool:
    return re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", file.name) is not None


def _json_table(files: Sequence[Path], key: str) -> Table:
    """By Python's own reader: the datasets library turns text that looks like a date into a date."""
    rows = [row for file in files for row in _json_rows(file, key)]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return Table(columns, [{column: row.get(column) for column in columns} for row in rows])


def _json_rows(file: Path, key: str) -> list[Row]:
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = list(enumerate(_parse(text, file, 1, key), 1))
        return [_object(row, file, number, key) for number, row in rows]
    lines = enumerate(text.split("\n"), 1)
    return [json_row(line, file, number, key) for number, line in lines if line.strip()]


def json_row(text: str, file: Path, line: int, key: str) -> Row:
    """The row on a line of a file."""
    return _object(_parse(text, file, line, key), file, line, key)


def _object(row: Any, file: Path, number: int, key: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError.of(key, file, f"example {number} is not an object with columns: {row!r}")
    return row


def _parse(text: str, file: Path, line: int, key: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = line + error.lineno - 1
        raise ConfigError.of(
            key, file, f"cannot be read: line {where} is not JSON ({error.msg}); repair or remove it"
        ) from error


def _datasets_table(kind: str, files: Sequence[Path], key: str) -> Table:
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        if all(file.stat().st_size == 0 for file in files):
            return Table([], [])
        table = load_dataset(kind, data_files=[str(f) for f in files], split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise ConfigError.of(key, files[0], f"cannot be read: {why(error.__cause__ or error)}") from error
    return Table(list(table.column_names), table)


def _hub(path: str, name: str | None, split: str, key: str) -> Table:
    table = from_hub(path, name, split, key, streaming=False)
    return Table(list(table.column_names), table)


def from_hub(path: str, name: str | None, split: str, key: str, streaming: bool) -> Any:
    """A dataset of the hub. Raises ConfigError where it is not to be had."""
    check_path(path, key)
    unreachable = why_unreachable()  # before the library reads what that has found
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    try:
        return load_dataset(path, name, split=split, streaming=streaming)
    except (DatasetsError, OSError, ValueError) as error:
        reason = unreachable or " ".join(str(error).split()).rstrip(".")
        raise ConfigError.of(
            key, path, f"is no local file, and the hub did not give it: {reason}; check the name, or give a file"
        ) from error


def need_columns(columns: Sequence[str], wanted: dict[str, str | None], path: str, otherwise: str = "") -> None:
    """Raise ConfigError unless each column of {config key: column} is one of `columns`. otherwise: what else may do."""
    for key, column in wanted.items():
        if column is not None and column not in columns:
            choices = f"{', '.join(columns)}{otherwise}{nearest(column, columns)}"
            raise ConfigError.of(key, column, f"choose one of the columns of {path}: {choices}")
