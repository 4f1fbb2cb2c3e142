"""Data that is not on this machine: s3://, https://, hf://, gs:// and whatever else fsspec opens.

Data that is read whole is copied into the cache folder and read there, with the same checks as local files; a changed
file is copied again. Streamed data is read where it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from grpocli.cache import cached, temporary_folder
from grpocli.errors import ConfigError
from grpocli.processes.deadline import within
from grpocli.text import CREDENTIALS, without_secrets

T = TypeVar("T")

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.")
VERSION = re.compile("etag|md5|digest|sha|crc|hash|modif|time|updated|created|blob|commit|version|generation", re.I)
"""Facts of file systems about a file that change with its content, or that name it."""
ANSWER_SECONDS = 60.0
"""Seconds to wait for a listing, and for the next piece of a file."""
FETCH_SECONDS = 3600.0
"""Seconds to wait for another process that makes a copy."""
PIECE = 2**22
"""Bytes of a piece."""
PACKAGES = {"s3": "pip install s3fs", "s3a": "pip install s3fs", "gs": "pip install gcsfs", "gcs": "pip install gcsfs"}


def is_remote(path: str) -> bool:
    """Whether a path is an address, such as s3://BUCKET/FILE.jsonl."""
    return ADDRESS.match(path) is not None


def check_address(path: str, key: str) -> None:
    """Raise ConfigError, naming `key`, for an address that nothing installed opens. Connects to nothing."""
    from fsspec import get_filesystem_class

    found = ADDRESS.match(path)
    protocol = found[1].lower() if found else ""
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        hint = PACKAGES.get(protocol, "install that package")
        problem = f"the package that opens {protocol}:// is not installed"
        raise ConfigError(problem, key=key, value=without_secrets(path), hint=hint) from error
    except ValueError as error:
        hint = "give a file, a folder, a name on the hub, or an address such as s3:// or https://"
        raise ConfigError(f"{protocol}:// is not known", key=key, value=without_secrets(path), hint=hint) from error


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at an address. It has the parts of `Path` that readers of data need."""

    url: str
    path: str
    size: int
    filesystem: Any = field(repr=False, compare=False)
    info: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name.partition("?")[0]).suffix

    def open(self, encoding: str = "utf-8", newline: str | None = None) -> IO[str]:
        """The file as text."""
        stream: IO[str] = self.filesystem.open(self.path, "r", encoding=encoding, newline=newline)
        return stream

    def copy(self) -> Path:
        """A copy in the cache folder, made now if there is none or if the file has changed.

        Without a word of the server about the version of the file, it is fetched each time, and an equal copy is kept.
        Raises OSError, and TimeoutError if nothing arrives for ANSWER_SECONDS.
        """
        name = self.name.partition("?")[0]
        if any(VERSION.search(fact) and value is not None for fact, value in self.info.items()):
            state = json.dumps([self.url, dict(self.info)], sort_keys=True, default=str)
            folder = _folder(hashlib.sha256(state.encode()))
            return cached(folder, (name,), lambda made: self._fetch(made / name), FETCH_SECONDS) / name
        with temporary_folder() as latest:
            self._fetch(latest / name)
            with (latest / name).open("rb") as file:
                folder = _folder(hashlib.file_digest(file, "sha256"))

            def keep(made: Path) -> None:
                (latest / name).rename(made / name)

            return cached(folder, (name,), keep, FETCH_SECONDS) / name

    def _fetch(self, target: Path) -> None:
        with self.filesystem.open(self.path, "rb") as source, target.open("wb") as copy:
            while piece := within(ANSWER_SECONDS, f"nothing for {ANSWER_SECONDS:g} s", lambda: source.read(PIECE)):
                copy.write(piece)


def remote_files(
    url: str, choose: Callable[[list[Any]], list[Any]], key: str, options: Mapping[str, Any]
) -> list[RemoteFile]:
    """The file at an address, or those files of a folder that `choose` selects.

    options: arguments of fsspec's file system. Raises ConfigError, naming `key`, if there are none.
    """
    check_address(url, key)
    from fsspec.core import url_to_fs

    with answers(url, key):
        filesystem, root = url_to_fs(url, **options)
        info = _asked(lambda: filesystem.info(root))
        if info["type"] != "directory":
            return [RemoteFile(url, root, info.get("size") or 0, filesystem, info)]
        listed = _asked(lambda: filesystem.ls(root, detail=True))
    found = [
        RemoteFile(filesystem.unstrip_protocol(one["name"]), one["name"], one.get("size") or 0, filesystem, one)
        for one in sorted(listed, key=lambda one: str(one["name"]))
        if one["type"] == "file"
    ]
    return choose(found)


def _folder(digest: hashlib._Hash) -> str:
    return f"data/{digest.hexdigest()[:16]}"


def _asked(call: Callable[[], T]) -> T:
    return within(ANSWER_SECONDS, f"no answer within {ANSWER_SECONDS:g} s", call)


@contextmanager
def answers(url: str, key: str) -> Iterator[None]:
    """A block whose errors of the file system and its server become ConfigErrors that name the address."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError("there is no such file or folder", key=key, value=without_secrets(url)) from error
    except Exception as error:  # each file system raises errors of its own library
        reason = " ".join(CREDENTIALS.sub("//", str(error)).split()).rstrip(".") or type(error).__name__
        raise ConfigError(f"cannot be read: {reason[:300]}", key=key, value=without_secrets(url)) from error


@contextmanager
def named_after(files: Sequence[RemoteFile], copies: Sequence[Path]) -> Iterator[None]:
    """A block whose ConfigErrors name the addresses of files instead of their copies."""
    try:
        yield
    except ConfigError as error:
        problem, value = error.problem, error.value
        for file, copy in zip(files, copies, strict=True):
            problem, value = problem.replace(str(copy), str(file)), file if str(value) == str(copy) else value
        raise ConfigError(problem, key=error.key, value=value, hint=error.hint) from error
