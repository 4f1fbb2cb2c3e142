"""The Python files of published versions of vLLM, to be read and not imported: nothing of vLLM is installed for it.

pip tells where a version's wheel is; of its 330 MB the index sends the 17 MB that hold Python files, within six
seconds, or all where it knows no ranges. A cache outside of the tree keeps them: 12 MB a version.
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
RESOLVE = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--quiet", "--report", "-")
LIMITS = ("--retries", "1", "--timeout", "30")
PLATFORM = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64", "--python-version", "3.12")


class Ranged(io.RawIOBase):
    """A file behind an address, read in ranges."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = {"Range": f"bytes={self.at}-{min(self.at + len(buffer), self.size) - 1}"}
        if self.at >= self.size:
            return 0
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=wanted), timeout=60) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def wheel(url: str) -> Any:
    """A wheel as a file that is read in ranges. Raises OSError if the server knows none."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=0-0"}), timeout=60) as answer:
        if answer.status != 206:
            raise OSError(f"{url} cannot be read in ranges")
        size = int(answer.headers["Content-Range"].rpartition("/")[2])
    return io.BufferedReader(Ranged(url, size), PIECE)


def fetch(version: str) -> Path:
    """The archive of a version's Python files, from the cache or the index. Raises OSError without the index."""
    kept = CACHE / f"vllm-{version}-py.zip"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            *RESOLVE,
            *LIMITS,
            *PLATFORM,
            "--target",
            folder,
            f"vllm=={version}",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if ended.returncode:
        raise OSError(ended.stderr.strip().splitlines()[-1])
    url = json.loads(ended.stdout)["install"][0]["download_info"]["url"]
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    with (
        wheel(url) as file,
        zipfile.ZipFile(file) as packed,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for member in sorted(packed.infolist(), key=lambda one: one.header_offset):
            if member.filename.endswith(".py"):
                out.writestr(member.filename, packed.read(member))
    unfinished.replace(kept)
    return kept


class VllmFiles:
    """Definitions in a version's files, found by their dotted names."""

    def __init__(self, version: str) -> None:
        self.version = version
        with zipfile.ZipFile(fetch(version)) as packed:
            self.texts = {name: packed.read(name).decode() for name in packed.namelist()}
        self.tree = cache(self._tree)

    def path(self, module: str) -> str | None:
        names = [f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
        return next((name for name in names if name in self.texts), None)

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.texts[self.path(module) or ""])

    def find(self, dotted: str) -> tuple[str, ast.AST] | None:
        """The module and the definition of `vllm.module.Name` or `vllm.module.Class.name`; None if there is none."""
        parts = dotted.split(".")
        for at in range(len(parts), 0, -1):
            if self.path(module := ".".join(parts[:at])):
                return self._within(module, parts[at:])
        return None

    def _within(self, module: str, names: list[str]) -> tuple[str, ast.AST] | None:
        if not names:
            return module, self.tree(module)
        found = self._global(module, names[0])
        for name in names[1:]:
            found = self._member(*found, name) if found and isinstance(found[1], ast.ClassDef) else None
        return found

    def _global(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """A name of a module, followed to where it is defined."""
        tree = self.tree(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
                package = module if (self.path(module) or "").endswith("__init__.py") else module.rpartition(".")[0]
                above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                source = ".".join(filter(None, [above, node.module]))
                real = next(one.name for one in node.names if (one.asname or one.name) == name)
                return self.find(f"{source}.{real}") if source.startswith("vllm") else (module, node)
            if isinstance(node, ast.Dict):  # vllm/__init__.py imports lazily: {"LLM": ".entrypoints.llm:LLM"}
                for key, value in zip(node.keys, node.values, strict=True):
                    if _text(key) == name and ":" in (_text(value) or ""):
                        return self.find(module + (_text(value) or "").replace(":", "."))
        return next(((module, node) for node in _statements(tree) if name in _names(node)), None)

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        """A method, field or attribute of a class or of its bases in vLLM."""
        for node in owner.body:
            if name in _names(node):
                return module, node
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                return module, node
        for found in self.bases(module, owner):
            if member := self._member(*found, name):
                return member
        return None

    def bases(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in owner.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self._global(module, name) if name.isidentifier() else None
            if found and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def arguments(self, dotted: str) -> list[str]:
        """The arguments of a function or method, or of a class: its `__init__`'s or its fields, bases first."""
        found = self.find(dotted)
        assert found, f"vLLM {self.version} has no {dotted}"
        module, node = found
        if isinstance(node, ast.ClassDef):
            own = self._member(module, node, "__init__")
            return arguments(own[1]) if own else self.fields(module, node)
        return arguments(node)

    def fields(self, module: str, owner: ast.ClassDef) -> list[str]:
        inherited = [name for base in self.bases(module, owner) for name in self.fields(*base)]
        return inherited + [ast.unparse(node.target) for node in owner.body if isinstance(node, ast.AnnAssign)]


def arguments(node: ast.AST) -> list[str]:
    """The arguments of a function, without self and cls; those of all overloads' last definition."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), ast.dump(node)
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _names(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.Assign):
        return {ast.unparse(one) for one in node.targets}
    return {one.asname or one.name for one in node.names} if isinstance(node, ast.Import) else set()


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module's statements, also those below `if` and `try`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                waiting.append(child)
