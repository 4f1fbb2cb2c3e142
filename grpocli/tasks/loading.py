"""Rows from files, addresses or the hub; unusable data is reported in one sentence."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.hub import hub_errors
from grpocli.text import CREDENTIALS, one_line, shorten, without_secrets

Row: TypeAlias = dict[str, Any]

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""The kind of a file, as the datasets library names it."""
COMPRESSED = (".gz", ".bz2", ".xz")
"""Further suffixes of text files, which fsspec unpacks."""
SAVED = ("state.json", "dataset_dict.json")
"""Files in the folders that `save_to_disk` of the datasets library writes: of a dataset, and of several splits."""
OTHER_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns; a row has None for a key that its JSON object lacks."""

    columns: list[str]
    rows: Sequence[Row]


def load_table(
    path: str, name: str | None, split: str, key: str = "task.path", options: Mapping[str, Any] | None = None
) -> Table:
    """All rows at `path`: a file, a folder of files of one kind, either also at an address, or a name on the hub.

    From a folder, the files whose names begin with `split` are taken (`train.jsonl`, `train-00000-of-00002.parquet`);
    for `train`, if there are none, all files that are not named after another split.
    options: of fsspec's file system, for an address. Raises ConfigError, naming `key`, if the data cannot be read, or
    if there are no rows.
    """
    table = _load(path, name, split, key, dict(options or {}))
    if not len(table.rows):
        raise ConfigError("it is empty; give data with at least one example", key=key, value=path)
    return table


def _load(path: str, name: str | None, split: str, key: str, options: dict[str, Any]) -> Table:
    local, remote = Path(path).expanduser(), is_remote(path)
    check_path(path, key)
    if not remote and not local.exists():
        return _table_of(_from_hub(path, name, split, key))
    if not remote and any((local / file).is_file() for file in SAVED):
        return _table_of(_saved_dataset(local, split, key))
    kind, files = _files_at(path, split, key, options)
    if kind in ("json", "csv"):
        return _with_all_columns(list(_text_rows(kind, files, key, options)))
    from datasets import load_dataset

    with readable(path, key):
        stored = {"storage_options": options} if options else {}
        dataset = load_dataset(kind, data_files=files, split="train", streaming=remote, **stored)
        return _with_all_columns(list(dataset)) if remote else _table_of(dataset)  # no copy is kept of an address


def _table_of(dataset: Any) -> Table:
    """The table of a dataset of the datasets library."""
    return Table(list(dataset.column_names), dataset)


def _with_all_columns(rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return Table(columns, [{**dict.fromkeys(columns), **row} for row in rows])


def _text_rows(kind: str, files: Sequence[str], key: str, options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of .jsonl, .json and .csv files, with exactly the values that are written there. Raises ConfigError.

    The reader of the datasets library guesses types: it makes dates of answers such as "2024-01-01", floats of large
    integers, and in a column of lists and texts the number 3 of "3".
    """
    import fsspec
    from fsspec.utils import infer_compression

    for file in files:
        how = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""} if kind == "csv" else {"mode": "rb"}
        packed = infer_compression(_bare(file))
        with readable(file, key), fsspec.open(file, compression=packed, **how, **options) as lines:
            for row, place in _csv(lines) if kind == "csv" else _json(lines):
                if not isinstance(row, dict):
                    raise ValueError(f"example {place} is not an object with columns: {row!r:.200}")
                yield row


def _json(lines: IO[bytes]) -> Iterator[tuple[Any, int]]:
    """The values of the lines and their numbers; of a file that is one list, the values in it."""
    begun = False
    for number, read in enumerate(lines, 1):
        line = read.removeprefix(BOM_UTF8)
        if not begun and line.lstrip().startswith(b"["):
            listed = _value(b"".join([line, *lines]), "the list")
            yield from zip(listed, range(1, len(listed) + 1), strict=True)
        elif line.strip():
            begun = True
            yield _value(line, f"line {number}"), number


def _value(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}); repair or remove it") from None


def _csv(lines: IO[str]) -> Iterator[tuple[Row, int]]:
    """The rows and their lines. Cells stay text, so that 007 is 007; empty ones are None; unnamed columns are left out.

    A row of more cells than columns is refused: a comma in a cell would shift its values.
    """
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(lines, strict=True)
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num} has more cells than there are columns")
        yield {name: cell or None for name, cell in row.items() if name}, reader.line_num


@contextmanager
def readable(path: str, key: str) -> Iterator[None]:
    """A block whose errors become a ConfigError that names the data, without passwords."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError("there is no such file or folder", key=key, value=without_secrets(path)) from error
    except Exception as error:  # each file system and each reader raises errors of its own library
        cause = error if isinstance(error, ImportError) else error.__cause__ or error
        reason = shorten(one_line(CREDENTIALS.sub("//", str(cause))), 300) or type(cause).__name__
        raise ConfigError(f"cannot be read: {reason}", key=key, value=without_secrets(path)) from error


def is_remote(path: str) -> bool:
    """Whether a path is an address, such as s3://BUCKET/FILE.jsonl."""
    return "://" in path


def looks_local(path: str) -> bool:
    """Whether a path that does not exist is meant as a local path, not as a name on the hub or an address."""
    if is_remote(path):
        return False
    return path.startswith(("/", ".", "~")) or kind_of(path) is not None or path.count("/") > 1


def check_path(path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, if a local path does not exist or nothing installed opens an address.

    Names on the hub pass. Connects to nothing.
    """
    if is_remote(path):
        from fsspec import get_filesystem_class

        with readable(path, key):
            get_filesystem_class(path.partition("://")[0].lower())
    elif looks_local(path) and not Path(path).expanduser().exists():
        raise ConfigError("there is no such file or folder", key=key, value=path)


def is_one_file(path: str) -> bool:
    """Whether a path is a file rather than a folder or a name on the hub, so that it has no splits."""
    return kind_of(path) is not None if is_remote(path) else Path(path).expanduser().is_file()


def kind_of(file: str) -> str | None:
    """The kind of a file by its name, as the datasets library calls it; None if it is no data."""
    name = PurePosixPath(_bare(file))
    return READERS.get(PurePosixPath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix)


def _bare(file: str) -> str:
    """A path, or an address without the parameters that sign it."""
    return file.partition("?")[0] if is_remote(file) else file


def _files_at(path: str, split: str, key: str, options: dict[str, Any]) -> tuple[str, list[str]]:
    """The kind of the files at `path`, a file or a folder, and the files."""
    from fsspec.core import url_to_fs

    path = path if is_remote(path) else str(Path(path).expanduser())
    files = [path]
    with readable(path, key):
        system, root = url_to_fs(path, **options)
        if is_folder := system.info(root)["type"] == "directory":
            found = system.find(root, maxdepth=1)
            files = [system.unstrip_protocol(name) for name in found] if is_remote(path) else found
    files = _of_split(files, path, split, key) if is_folder else files
    kinds = {kind_of(file) for file in files}
    if len(kinds) != 1 or None in kinds:
        names = ", ".join(sorted({PurePosixPath(_bare(file)).name for file in files})) or "none of them"
        problem = f"needs files of one kind of {', '.join(READERS)}; found {names}"
        raise ConfigError(problem, key=key, value=without_secrets(path))
    return str(kinds.pop()), files


def _of_split(found: Sequence[str], folder: str, split: str, key: str) -> list[str]:
    """Of the files in a folder, those of a split, sorted by name."""
    names = {PurePosixPath(_bare(file)).name: file for file in found if kind_of(file)}

    def named(start: str) -> set[str]:
        return {name for name in names if re.match(rf"{re.escape(start)}(?![A-Za-z0-9])", name)}

    chosen = named(split)
    if not chosen and split == "train":
        chosen = names.keys() - set().union(*map(named, OTHER_SPLITS))
    if names and not chosen:
        problem = f"has no {split}.jsonl or other file of that name; found {', '.join(sorted(names))}"
        raise ConfigError(problem, key=key, value=without_secrets(folder))
    return [names[name] for name in sorted(chosen)]


def _saved_dataset(path: Path, split: str, key: str) -> Any:
    """The dataset in a folder that the datasets library's `save_to_disk` wrote."""
    from datasets import DatasetDict, load_from_disk

    with readable(str(path), key):
        saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        return saved
    if split not in saved:
        problem = f"has the splits {', '.join(sorted(saved))}{nearest(split, saved)}"
        raise ConfigError(problem, key=f"{key.rpartition('.')[0]}.split", value=split)
    return saved[split]


def _from_hub(path: str, name: str | None, split: str, key: str) -> Any:
    """A dataset of the hub. Raises ConfigError if it is not available."""
    with hub_errors(key, path, cached=True):
        from datasets import load_dataset

        return load_dataset(path, name, split=split)


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
