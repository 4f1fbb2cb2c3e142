"""Rows that are read as they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from grpocli.errors import ConfigError
from grpocli.tasks.loading import (
    EMPTY,
    Row,
    Table,
    columns_of,
    files_at,
    from_hub,
    json_row,
    quiet_datasets,
    reading,
    unreadable,
)


class Rows(Protocol):
    """The rows of somebody's data, in its order. Both raise ConfigError where they cannot be read."""

    def read(self, start: int) -> Iterator[Row]:
        """From the start-th row on; what is before it is passed over as cheaply as can be."""
        ...

    def count(self) -> int:
        """How many there are, which may take reading all of them."""
        ...


def open_rows(path: str, name: str | None, split: str, key: str) -> Rows:
    """The rows at `path`, as `load_table` finds them. Raises ConfigError, naming `key`."""
    local = Path(path).expanduser()
    if not local.exists():
        return DatasetRows(from_hub(path, name, split, key, streaming=True), path, key)
    kind, files = files_at(local, split, key)
    if kind == "json":
        return JsonLines(files, key)
    from datasets import load_dataset

    quiet_datasets()
    full = [file for file in files if file.stat().st_size]
    with _readable(path, key):
        if not full:
            return DatasetRows(None, path, key)
        names, options = [str(file) for file in full], reading(kind, full)
        return DatasetRows(load_dataset(kind, data_files=names, split="train", streaming=True, **options), path, key)


def load_streamed(path: str, name: str | None, split: str, key: str) -> Table:
    """All rows of one split: the hub would be asked for the files of every split otherwise."""
    rows = list(open_rows(path, name, split, key).read(0))
    if not rows:
        raise ConfigError(EMPTY, key=key, value=path)
    columns = columns_of(rows, path, key)
    return Table(columns, [with_columns(row, columns) for row in rows])


def with_columns(row: Row, columns: Sequence[str]) -> Row:
    """The row with None where it has no such column."""
    return {**dict.fromkeys(columns), **row}


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Files with an object a line. Lines that are passed over are not parsed."""

    files: Sequence[Path]
    key: str

    def read(self, start: int) -> Iterator[Row]:
        for file, number, line in islice(self._lines(), start, None):
            yield json_row(line, file, number, self.key)

    def count(self) -> int:
        return sum(1 for _ in self._lines())

    def _lines(self) -> Iterator[tuple[Path, int, str]]:
        for file in self.files:
            with _readable(file, self.key), file.open(encoding="utf-8-sig", newline="\n") as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1 and line.lstrip().startswith("["):
                        problem = "is a JSON list, which has to be read whole; give an object a line, or "
                        raise ConfigError(problem + "task.streaming=false", key=self.key, value=file)
                    if line.strip():
                        yield file, number, line


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """An iterable dataset of the datasets library; None where all files are empty."""

    dataset: Any
    path: str
    key: str

    def read(self, start: int) -> Iterator[Row]:
        with _readable(self.path, self.key):
            if self.dataset is not None:
                yield from self.dataset.skip(start)

    def count(self) -> int:
        with _readable(self.path, self.key):
            parts = [] if self.dataset is None else self.dataset.iter(batch_size=1000)
            return sum(len(next(iter(columns.values()))) for columns in parts)


@contextmanager
def _readable(path: str | Path, key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # those of pyarrow, pandas and the hub are such errors too
        raise unreadable(key, path, error) from error
