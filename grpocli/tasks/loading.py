"""Tables from local files or the hub, by the datasets library, with its troubles as one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_table(path: str, name: str | None, split: str, key: str = "task.path") -> Dataset:
    """The table at `path`: a file, a folder of files of one kind, or a name on the hub.

    Raises ConfigError, naming `key`, where it cannot be read or is empty.
    """
    from datasets import disable_progress_bars

    disable_progress_bars()
    local = Path(path).expanduser()
    table = _local(local, key) if local.exists() else _hub(path, name, split, key)
    if len(table) == 0:
        raise ConfigError.of(key, path, "it is empty")
    return table


def looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as one, rather than as a name on the hub."""
    return path.startswith(("/", "./", "../", "~")) or Path(path).suffix in READERS or path.count("/") > 1


def _local(path: Path, key: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in READERS)
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= READERS.keys():
        found = f"found {', '.join(sorted(kinds))}" if kinds else "found none"
        raise ConfigError.of(key, path, f"needs files of one kind of {', '.join(READERS)}; {found}")
    if all(file.stat().st_size == 0 for file in files):
        raise ConfigError.of(key, path, "it is empty")
    try:
        return load_dataset(READERS[kinds.pop()], data_files=[str(f) for f in files], split="train")
    except (DatasetGenerationError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError.of(key, path, f"cannot be read: {reason}") from error


def _hub(path: str, name: str | None, split: str, key: str) -> Dataset:
    if looks_local(path):
        raise ConfigError.of(key, path, "there is no such file or folder")
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(path, name, split=split)
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError.of(
            key, path, f"is no local file, and the hub did not give it: {reason}; check the name, or give a file"
        ) from error


def need_columns(table: Any, wanted: dict[str, str | None], path: str) -> None:
    """Raise ConfigError unless the table has each column of {config key: column}."""
    columns = list(table.column_names)
    for key, column in wanted.items():
        if column is not None and column not in columns:
            raise ConfigError.of(
                key, column, f"{path} has the columns {', '.join(columns)}{nearest(column, columns)}"
            )
