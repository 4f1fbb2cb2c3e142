"""Tables of rows from files, addresses or the hub; an unusable file is reported in one sentence."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar, cast

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.hub import why_unreachable
from grpocli.tasks.json_rows import Row, read_json, unreadable
from grpocli.tasks.remote import (
    RemoteFile,
    answers,
    check_address,
    is_remote,
    named_after,
    remote_files,
)
from grpocli.text import without_secrets

DataFile: TypeAlias = Path | RemoteFile
F = TypeVar("F", Path, RemoteFile)

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
"""The kind of a file, as the datasets library names it."""
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files in the folders that `save_to_disk` of the datasets library writes: of a dataset, and of several splits."""
OF_ARCHIVE = ("__key__", "__url__")
"""Columns that the datasets library adds to the samples of a webdataset."""
OTHER_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
EMPTY = "it is empty; give data with at least one example"
MAX_COLUMNS = 1000


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns; a row has None for a key that its JSON object lacks."""

    columns: list[str]
    rows: Sequence[Row]


def load_table(
    path: str, name: str | None, split: str, key: str = "task.path", options: Mapping[str, Any] | None = None
) -> Table:
    """The table at `path`: a file, a folder of files of one kind, either also at an address, or a name on the hub.

    From a folder, the files whose names begin with `split` are taken (`train.jsonl`, `train-00000-of-00002.parquet`);
    for `train`, if there are none, all files that are not named after another split.
    options: of fsspec's file system, for an address. Raises ConfigError, naming `key`, if the data cannot be read or
    is empty.
    """
    local = Path(path).expanduser()
    if is_remote(path):
        table = _remote(path, split, key, options or {})
    else:
        table = _local(local, split, key) if local.exists() else _hub(path, name, split, key)
    if len(table.rows) == 0:
        raise ConfigError(EMPTY, key=key, value=path)
    return table


def looks_local(path: str) -> bool:
    """Whether a path that does not exist is meant as a local path, not as a name on the hub or an address."""
    if is_remote(path):
        return False
    return path.startswith(("/", ".", "~")) or Path(path).suffix in READERS or path.count("/") > 1


def check_path(path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, if a local file or folder does not exist. Names on the hub pass."""
    if is_remote(path):
        check_address(path, key)
    elif looks_local(path) and not Path(path).expanduser().exists():
        raise ConfigError("there is no such file or folder", key=key, value=path)


def is_one_file(path: str) -> bool:
    """Whether a path is a file rather than a folder or a name on the hub, so that it has no splits."""
    if is_remote(path):
        return PurePosixPath(path.partition("?")[0]).suffix in READERS
    return Path(path).expanduser().is_file()


def files_at(path: Path, split: str, key: str) -> tuple[str, list[Path]]:
    """The kind of the files, as the datasets library names it, and the files at `path`, a file or a folder."""
    if not path.is_file() and not path.is_dir():
        raise ConfigError("is neither a file nor a folder", key=key, value=path)
    files = [path] if path.is_file() else _files_of([p for p in path.iterdir() if p.is_file()], path, split, key)
    return kind_of(files, path, key), files


def remote_files_at(path: str, split: str, key: str, options: Mapping[str, Any]) -> tuple[str, list[RemoteFile]]:
    """`files_at` for an address. Raises ConfigError, without a password in the address."""
    files = remote_files(path, lambda found: _files_of(found, without_secrets(path), split, key), key, options)
    return kind_of(files, without_secrets(path), key), files


def size_of(file: DataFile) -> int:
    """The bytes of a file; 1 if its server does not say."""
    return (file.size or 1) if isinstance(file, RemoteFile) else file.stat().st_size


def kind_of(files: Sequence[DataFile], path: str | Path, key: str) -> str:
    """The kind that all files have. Raises ConfigError if they have none, or several."""
    kinds = {READERS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({f.suffix or f.name for f in files})) or "none of them"
        raise ConfigError(f"needs files of one kind of {', '.join(READERS)}; found {found}", key=key, value=path)
    if kinds == {"csv"}:
        _check_headers(files, key)
    return cast(str, kinds.pop())


def _check_headers(files: Sequence[DataFile], key: str) -> None:
    """Raise ConfigError for a .csv that names a column twice, or has other columns than the files before it."""
    first: set[str] = set()
    for file in files:
        try:
            names = _header(file)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise unreadable(key, file, error) from error
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ConfigError(f"line 1 has two columns called {twice[0]!r}; rename or remove one", key=key, value=file)
        if len(names) == 1 and (mark := re.search(r"[;\t|]", names[0])):
            problem = f"line 1 has one column, {names[0]!r}; save it with commas instead of {mark[0]!r} between columns"
            raise ConfigError(problem, key=key, value=file)
        if names and first and set(names) != first:
            differing = ", ".join(sorted(map(repr, set(names) ^ first))[:5])
            problem = f"its columns are not those of {files[0].name}: they differ in {differing}"
            raise ConfigError(problem, key=key, value=file)
        first = first or set(names)


def _local(path: Path, split: str, key: str) -> Table:
    if (saved := saved_dataset(path, split, key)) is not None:
        return Table(list(saved.column_names), saved)
    kind, files = files_at(path, split, key)
    try:
        return _table(kind, files, key)
    except OSError as error:
        raise unreadable(key, path, error) from error


def _table(kind: str, files: Sequence[Path], key: str) -> Table:
    if kind == "json":
        return table_of([row for file in files for row in read_json(file, key)], files[0], key)
    return _datasets_table(kind, files, key)


def _remote(path: str, split: str, key: str, options: Mapping[str, Any]) -> Table:
    kind, files = remote_files_at(path, split, key, options)
    copies: list[Path] = []
    for file in files:
        with answers(str(file), key):
            copies.append(file.copy())
    with named_after(files, copies):
        return _table(kind, copies, key)


def saved_dataset(path: Path, split: str, key: str) -> Any:
    """The dataset in a folder that the datasets library's `save_to_disk` wrote; None for another folder."""
    if (path / SAVED_SPLITS).is_file():
        splits = [part.name for part in sorted(path.iterdir()) if (part / SAVED).is_file()]
        if split not in splits:
            found = f"has the splits {', '.join(splits)}{nearest(split, splits)}"
            raise ConfigError(found, key=f"{key.rpartition('.')[0]}.split", value=split)
        path = path / split
    if not (path / SAVED).is_file():
        return None
    from datasets import load_from_disk

    try:
        saved = load_from_disk(str(path))
        saved.data.validate(full=True)
    except (OSError, ValueError) as error:
        raise unreadable(key, path, error) from error
    return saved


def _files_of(found: Sequence[F], folder: str | Path, split: str, key: str) -> list[F]:
    """Of the files in a folder, those of a split."""
    files = sorted((file for file in found if file.suffix in READERS), key=lambda file: file.name)
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


def _is_named(file: DataFile, split: str) -> bool:
    return re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", file.name) is not None


def table_of(rows: Sequence[Row], path: str | Path, key: str) -> Table:
    """The table of rows that may lack columns."""
    columns = columns_of(rows, path, key)
    return Table(columns, [with_columns(row, columns) for row in rows])


def with_columns(row: Row, columns: Sequence[str]) -> Row:
    """The row with None for each column that it lacks."""
    return {**dict.fromkeys(columns), **row}


def columns_of(rows: Sequence[Row], path: str | Path, key: str) -> list[str]:
    """The columns of all rows. Raises ConfigError for too many, since every row gets all of them."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
        if len(columns) > MAX_COLUMNS:
            problem = f"has more than {MAX_COLUMNS:,} columns; give rows that have the same ones"
            raise ConfigError(problem, key=key, value=path)
    return list(columns)


def _datasets_table(kind: str, files: Sequence[Path], key: str) -> Table:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        if all(file.stat().st_size == 0 for file in files):
            return Table([], [])
        table = load_dataset(kind, data_files=[str(f) for f in files], split="train", **reader_options(kind, files))
        table.data.validate(full=True)  # a .parquet may have text that is not UTF-8
    except (DatasetGenerationError, ValueError) as error:
        raise unreadable(key, files[0], error.__cause__ or error) from error
    if kind == "webdataset":
        return table_of([sample_row(sample) for sample in table], files[0], key)
    return Table(list(table.column_names), table)


def sample_row(sample: Row) -> Row:
    """The row of a sample of a webdataset."""
    row = {column: value for column, value in sample.items() if column not in OF_ARCHIVE}
    inner = row.pop("json", None)
    return {**inner, **row} if isinstance(inner, dict) else {**row, **({} if inner is None else {"json": inner})}


def reader_options(kind: str, files: Sequence[DataFile]) -> dict[str, Any]:
    """Options for the reader of the datasets library.

    Cells of a .csv are read as text, and empty ones as None. Guessed types would turn the answer 007 into 7, 1.50 into
    1.5, NA into None, and would change the last digits of large numbers.
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


def _header(file: DataFile) -> list[str]:
    """The column names of a .csv, after any blank lines."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        return next((row for row in csv.reader(lines) if row), [])


def _hub(path: str, name: str | None, split: str, key: str) -> Table:
    table = from_hub(path, name, split, key, streaming=False)
    return Table(list(table.column_names), table)


def from_hub(path: str, name: str | None, split: str, key: str, streaming: bool) -> Any:
    """A dataset of the hub. Raises ConfigError if it is not available."""
    check_path(path, key)
    unreachable = why_unreachable()  # before the library reads what that has found
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(path, name, split=split, streaming=streaming)
    except (DatasetsError, OSError, ValueError) as error:
        reason = unreachable or " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"there is no such local file, and the hub did not return it: {reason}; check the name, or give a file",
            key=key,
            value=path,
        ) from error


def missing_value(value: Any) -> str:
    """`nothing`, `nan` or `inf` if a value, or one inside it, is that; empty if it is usable."""
    if value is None:
        return "nothing"
    if isinstance(value, list | dict):
        inside = value.values() if isinstance(value, dict) else value
        return next((found for one in inside if one is not None and (found := missing_value(one))), "")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else ""


def need_columns(columns: Sequence[str], wanted: dict[str, str | None], path: str, otherwise: str = "") -> None:
    """Raise ConfigError if a column of {config key: column} is not in `columns`. otherwise: text after the choices."""
    for key, column in wanted.items():
        if column is not None and column not in columns:
            choices = f"{', '.join(columns)}{otherwise}{nearest(column, columns)}"
            raise ConfigError(f"choose one of the columns of {path}: {choices}", key=key, value=column)
