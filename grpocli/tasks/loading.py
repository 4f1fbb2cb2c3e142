"""Rows from files, addresses or the hub; unusable data is reported in one sentence."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli.hub import why_unreachable
from grpocli.text import CREDENTIALS, without_secrets

Row: TypeAlias = dict[str, Any]

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
"""The kind of a file, as the datasets library names it."""
COMPRESSED = (".gz", ".bz2", ".xz")
"""Further suffixes of text files, which fsspec unpacks."""
SAVED = ("state.json", "dataset_dict.json")
"""Files in the folders that `save_to_disk` of the datasets library writes: of a dataset, and of several splits."""
OF_ARCHIVE = ("__key__", "__url__")
"""Columns that the datasets library adds to the samples of a webdataset."""
OTHER_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
EMPTY = "it is empty; give data with at least one example"
QUOTED = 200
"""Characters of a value that an error quotes."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns; a row has None for a key that its JSON object lacks."""

    columns: list[str]
    rows: Sequence[Row]


def load_table(
    path: str,
    name: str | None,
    split: str,
    key: str = "task.path",
    options: Mapping[str, Any] | None = None,
    streaming: bool = False,
) -> Table:
    """All rows at `path`, as `open_rows` finds them. Raises ConfigError, naming `key`, also if there are none.

    streaming: of a dataset on the hub, without downloading the files of its other splits.
    """
    streaming = streaming or is_remote(path)
    source = open_rows(path, name, split, key, options, streaming)
    if isinstance(source, DatasetRows) and not (streaming or source.samples):
        with readable(path, key):
            source.dataset.data.validate(full=True)  # a .parquet may have text that is not UTF-8
        table = Table(list(source.dataset.column_names), source.dataset)
    else:
        rows = list(source.read(0))
        columns = columns_of(rows)
        table = Table(columns, [with_columns(row, columns) for row in rows])
    if not len(table.rows):
        raise ConfigError(EMPTY, key=key, value=path)
    return table


def open_rows(
    path: str,
    name: str | None,
    split: str,
    key: str,
    options: Mapping[str, Any] | None = None,
    streaming: bool = True,
) -> RowSource:
    """The rows at `path`: a file, a folder of files of one kind, either also at an address, or a name on the hub.

    From a folder, the files whose names begin with `split` are taken (`train.jsonl`, `train-00000-of-00002.parquet`);
    for `train`, if there are none, all files that are not named after another split.
    options: of fsspec's file system, for an address. streaming: a dataset of the datasets library is read while it is
    iterated over; this is the only way for an address. Raises ConfigError, naming `key`, if the data cannot be read.
    """
    local, options = Path(path).expanduser(), options or {}
    if not is_remote(path):
        if not local.exists():
            return DatasetRows(_from_hub(path, name, split, key, streaming), path, key)
        if (saved := _saved_dataset(local, split, key)) is not None:
            return DatasetRows(saved.to_iterable_dataset() if streaming else saved, path, key)
    kind, files = _files_at(path, split, key, options)
    if kind in ("json", "csv"):
        return TextRows(kind, files, key, options)
    from datasets import load_dataset
    from fsspec import open_local

    archive, remote = kind == "webdataset", is_remote(path)
    with readable(path, key):
        if archive and remote:  # the library does not stream these from everywhere
            protocol = path.partition("://")[0]
            files = open_local([f"simplecache::{file}" for file in files], **{protocol: dict(options)})
        stored = {"storage_options": dict(options)} if options else {}
        dataset = load_dataset(kind, data_files=files, split="train", streaming=streaming, **stored)
    return DatasetRows(dataset, path, key, archive)


@dataclass(frozen=True, slots=True)
class TextRows:
    """The rows of .jsonl, .json and .csv files, with exactly the values that are written there.

    The reader of the datasets library guesses types: it makes dates of answers such as "2024-01-01", floats of large
    integers, and in a column of lists and texts the number 3 of "3".
    """

    kind: str
    files: Sequence[str]
    key: str
    options: Mapping[str, Any]

    def read(self, start: int) -> Iterator[Row]:
        """The rows from number `start` on; earlier lines of JSON are not parsed. Raises ConfigError."""
        for parse in islice(self._unparsed(), start, None):
            yield parse()

    def count(self) -> int:
        """The number of rows, which requires reading all files."""
        return sum(1 for _ in self._unparsed())

    def _unparsed(self) -> Iterator[Callable[[], Row]]:
        """A function for each row that makes it."""
        import fsspec
        from fsspec.utils import infer_compression

        rows_of: Callable[[IO[str], str], Iterator[Callable[[], Row]]]
        rows_of, newline = (partial(self._csv, columns=[]), "") if self.kind == "csv" else (self._json, "\n")
        for file in self.files:
            text = {"encoding": "utf-8-sig", "newline": newline, "compression": infer_compression(_bare(file))}
            with readable(file, self.key), fsspec.open(file, "rt", **text, **self.options) as lines:
                yield from rows_of(lines, file)

    def _json(self, lines: IO[str], file: str) -> Iterator[Callable[[], Row]]:
        """The object of each line; of a file that is one list, the objects in it."""
        begun = False
        for number, line in enumerate(lines, 1):
            if not begun and line.lstrip().startswith("["):
                rows = self._value("".join([line, *lines]), file, number)
                yield from (partial(self._object, row, file, place) for place, row in enumerate(rows, 1))
            elif line.strip():
                begun = True
                yield partial(self._line, line, file, number)

    def _line(self, line: str, file: str, number: int) -> Row:
        return self._object(self._value(line, file, number), file, number)

    def _object(self, row: Any, file: str, number: int) -> Row:
        if not isinstance(row, dict):
            raise self._error(f"example {number} is not an object with columns: {short(row)}", file)
        return row

    def _value(self, text: str, file: str, line: int) -> Any:
        """The value of a JSON text that begins on a line."""
        try:
            return json.loads(text.rstrip())
        except (ValueError, RecursionError) as error:
            at, reason = line + getattr(error, "lineno", 1) - 1, getattr(error, "msg", error)
            problem = f"cannot be read: line {at} is not JSON ({reason}); repair or remove it"
            raise self._error(problem, file) from error

    def _csv(self, lines: IO[str], file: str, columns: list[str]) -> Iterator[Callable[[], Row]]:
        """Cells stay text, so that 007 is 007; empty ones are None, and columns without a name are left out.

        columns: those of the first file, in any order; empty before it.
        """
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(lines, strict=True)
        try:
            yield from self._csv_rows(reader, file, columns)
        except csv.Error as error:
            problem = f"cannot be read: line {reader.line_num} is not CSV ({error}); repair or remove it"
            raise self._error(problem, file) from error

    def _csv_rows(self, reader: Any, file: str, columns: list[str]) -> Iterator[Callable[[], Row]]:
        names: list[str] = next((row for row in reader if row), [])
        if twice := next((name for name in names if name and names.count(name) > 1), ""):
            raise self._error(f"line 1 has two columns called {twice!r}; rename or remove one", file)
        columns[:] = columns or names
        if other := ", ".join(sorted({*names} ^ {*columns})):
            raise self._error(f"its columns are not those of {self.files[0]}: they differ in {other}", file)
        for cells in reader:
            if len(cells) > len(names):
                problem = f"line {reader.line_num} has {len(cells)} cells, and the first line {len(names)} columns"
                raise self._error(problem, file)
            if cells:
                row = {name: cell or None for name, cell in zip_longest(names, cells) if name}
                yield partial(dict, row)

    def _error(self, problem: str, file: str) -> ConfigError:
        return ConfigError(problem, key=self.key, value=without_secrets(file))


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """The rows of a dataset of the datasets library. samples: it is a webdataset."""

    dataset: Any
    path: str
    key: str
    samples: bool = False

    def read(self, start: int) -> Iterator[Row]:
        """The rows from number `start` on. Raises ConfigError if the data cannot be read."""
        with readable(self.path, self.key):
            rows = self.dataset.skip(start)
            yield from map(_sample_row, rows) if self.samples else rows

    def count(self) -> int:
        """The number of rows, which may require reading all of them."""
        with readable(self.path, self.key):
            return sum(len(next(iter(columns.values()))) for columns in self.dataset.iter(batch_size=1000))


RowSource: TypeAlias = TextRows | DatasetRows
"""The rows of a dataset, in order."""


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
        cause = error.__cause__ or error
        reason = " ".join(CREDENTIALS.sub("//", str(cause)).split()).rstrip(".")[:300] or type(cause).__name__
        remedy = "; it must be UTF-8: save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else ""
        raise ConfigError(f"cannot be read: {reason}{remedy}", key=key, value=without_secrets(path)) from error


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

        try:
            get_filesystem_class(path.partition("://")[0].lower())
        except (ImportError, ValueError) as error:
            raise ConfigError(f"cannot be opened: {error}", key=key, value=without_secrets(path)) from error
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


def _files_at(path: str, split: str, key: str, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The kind of the files at `path`, a file or a folder, and the files."""
    check_path(path, key)
    if is_remote(path):
        from fsspec.core import url_to_fs

        with readable(path, key):
            system, root = url_to_fs(path, **options)
            is_folder = system.info(root)["type"] == "directory"
            listed = system.ls(root, detail=True) if is_folder else []
        found = [system.unstrip_protocol(one["name"]) for one in listed if one["type"] == "file"]
    else:
        local = Path(path).expanduser()
        is_folder = local.is_dir()
        if not is_folder and not local.is_file():
            raise ConfigError("is neither a file nor a folder", key=key, value=path)
        found = [str(file) for file in local.iterdir() if file.is_file()] if is_folder else []
        path = str(local)
    files = _of_split(found, path, split, key) if is_folder else [path]
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
    """The dataset in a folder that the datasets library's `save_to_disk` wrote; None for another folder."""
    if not any((path / name).is_file() for name in SAVED):
        return None
    from datasets import DatasetDict, load_from_disk

    with readable(str(path), key):
        saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        return saved
    if split not in saved:
        problem = f"has the splits {', '.join(sorted(saved))}{nearest(split, saved)}"
        raise ConfigError(problem, key=f"{key.rpartition('.')[0]}.split", value=split)
    return saved[split]


def _from_hub(path: str, name: str | None, split: str, key: str, streaming: bool) -> Any:
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


def _sample_row(sample: Row) -> Row:
    """The row of a sample of a webdataset."""
    row = {column: value for column, value in sample.items() if column not in OF_ARCHIVE}
    inner = row.pop("json", None)
    return {**inner, **row} if isinstance(inner, dict) else {**row, **({} if inner is None else {"json": inner})}


def with_columns(row: Row, columns: Sequence[str]) -> Row:
    """The row with None for each column that it lacks."""
    return {**dict.fromkeys(columns), **row}


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of all rows."""
    return list(dict.fromkeys(column for row in rows for column in row))


def short(value: Any) -> str:
    """A value as an error quotes it, shortened."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]} ..."


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
            if len(columns) == 1 and re.search(r"[;\t]", columns[0]):
                raise ConfigError(f"has one column, {short(columns[0])}; save it with commas", key=key, value=path)
            choices = f"{', '.join(columns)}{otherwise}{nearest(column, columns)}"
            raise ConfigError(f"choose one of the columns of {path}: {choices}", key=key, value=column)
