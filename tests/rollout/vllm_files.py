"""The Python files of published versions of vLLM, to be read and not imported: nothing of vLLM is installed for it.

pip tells where a version's wheel is; of its 330 MB the index sends the 17 MB that hold Python files, within six
seconds. A cache outside of the tree keeps them: 12 MB a version.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpocli-tests"
PIECE = 2**20  # bytes of a request: most Python files lie side by side
RESOLVE = (
    "-m pip install --dry-run --ignore-installed --no-deps --only-binary=:all: --quiet --report - --retries 1 "
    "--timeout 30 --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --python-version 3.12 --target"
)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Found = tuple[str, Any]
"""A module and a node in it."""


class Ranged(io.RawIOBase):
    """A file behind an address, read in ranges. Raises OSError if the server knows none."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        self.size = int(self.get(0, 0)[1].rpartition("/")[2])

    def get(self, first: int, last: int) -> tuple[bytes, str]:
        wanted = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{last}"})
        with urllib.request.urlopen(wanted, timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url} cannot be read in ranges")
            return answer.read(), answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        last = min(self.at + len(buffer), self.size) - 1
        data = self.get(self.at, last)[0] if self.at <= last else b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def fetch(version: str) -> Path:
    """The archive of a version's Python files, from the cache or the index. Raises OSError without the index."""
    kept = CACHE / f"vllm-{version}-py.zip"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *RESOLVE.split(), folder, f"vllm=={version}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if ended.returncode:
        raise OSError(ended.stderr.strip().splitlines()[-1])
    url = json.loads(ended.stdout)["install"][0]["download_info"]["url"]
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    wheel = io.BufferedReader(Ranged(url), PIECE)
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as out:
        for member in sorted(packed.infolist(), key=lambda one: one.header_offset):
            if member.filename.endswith(".py"):
                out.writestr(member.filename, packed.read(member))
    unfinished.replace(kept)
    return kept


class VllmFiles:
    """Definitions in a version's files, found by their dotted names."""

    def __init__(self, version: str) -> None:
        self.version, self.minor = version, version.rpartition(".")[0]
        with zipfile.ZipFile(fetch(version)) as packed:
            self.texts = {name: packed.read(name).decode() for name in packed.namelist()}
        self.tree = cache(lambda module: ast.parse(self.texts[self.path(module)]))

    def path(self, module: str) -> str:
        names = [f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
        return next((name for name in names if name in self.texts), "")

    def find(self, dotted: str) -> Found | None:
        """The module and the definition of `vllm.module.Name` or `vllm.module.Class.name`; None if there is none."""
        parts = dotted.split(".")
        at = next((at for at in range(len(parts), 0, -1) if self.path(".".join(parts[:at]))), 0)
        module, names = ".".join(parts[:at]), parts[at:]
        if not at or not names:
            return (module, self.tree(module)) if at else None
        found = self._global(module, names[0])
        for name in names[1:]:
            found = self._member(*found, name) if found and isinstance(found[1], ast.ClassDef) else None
        return found

    def _global(self, module: str, name: str) -> Found | None:
        """A name of a module, followed to where it is defined."""
        tree = self.tree(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (
                real := [a.name for a in node.names if name == (a.asname or a.name)]
            ):
                inside = [*module.split("."), ""] if self.path(module).endswith("__init__.py") else module.split(".")
                above = inside[: -node.level] if node.level else []
                source = ".".join([*above, *filter(None, [node.module])])
                return self.find(f"{source}.{real[0]}") if source.startswith("vllm") else (module, node)
            if isinstance(node, ast.Dict):  # vllm/__init__.py imports lazily: {"LLM": ".entrypoints.llm:LLM"}
                for key, value in zip(node.keys, node.values, strict=True):
                    if _text(key) == name and ":" in _text(value):
                        return self.find(module + _text(value).replace(":", "."))
        return next(((module, node) for node in _statements(tree) if name in _names(node)), None)

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> Found | None:
        """A method, field or attribute of a class or of its bases in vLLM."""
        for node in (*owner.body, *ast.walk(owner)):
            stored = isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
            if stored or (node in owner.body and name in _names(node)):
                return module, node
        return next(filter(None, (self._member(*base, name) for base in self.bases(module, owner))), None)

    def bases(self, module: str, owner: ast.ClassDef) -> Iterator[Found]:
        for base in owner.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self._global(module, name) if name.isidentifier() else None
            if found and isinstance(found[1], ast.ClassDef):
                yield found

    def arguments(self, dotted: str) -> list[str]:
        """The arguments of a function or method, or of a class: its `__init__`'s or its fields, bases first."""
        found = self.find(dotted)
        assert found, f"vLLM {self.version} has no {dotted}"
        own = self._member(*found, "__init__") if isinstance(found[1], ast.ClassDef) else found
        return arguments(own[1]) if own else self.fields(*found)

    def fields(self, module: str, owner: ast.ClassDef) -> list[str]:
        inherited = [name for base in self.bases(module, owner) for name in self.fields(*base)]
        return inherited + [ast.unparse(node.target) for node in owner.body if isinstance(node, ast.AnnAssign)]


def arguments(node: ast.AST) -> list[str]:
    """The arguments of a function, without self and cls."""
    assert isinstance(node, FUNCTION), ast.dump(node)
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _names(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.Import):
        return {one.asname or one.name for one in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return {ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    return {node.name} if isinstance(node, (*FUNCTION, ast.ClassDef)) else set()


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A module's statements, also those below `if` and `try`."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, (*FUNCTION, ast.ClassDef)):
            yield from _statements(child)
