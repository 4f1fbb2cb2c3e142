"""Loads single source files of other trainers: their own functions, without the packages that their trainers need.

verl and SkyRL are installed without their requirements (requirements/peers.txt). The packages of NeMo RL, slime and
prime-rl hold no losses, or there are none; their files are read from checkouts in the folder GRPOCLI_PEERS.
Every other module that such a file imports (ray, Megatron, ...) is a placeholder that no compared function calls.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

FOLDER = "GRPOCLI_PEERS"


class Placeholder:
    """Stands for a class, a decorator or an annotation: everything that a file needs of it while it is imported."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, item: Any) -> Placeholder:
        return self

    def __or__(self, other: Any) -> Placeholder:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False


class PlaceholderModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


@dataclass(frozen=True)
class Source:
    """Where a peer's files are, and what stands for everything else.

    modules: the real ones, as {dotted name: path below the root}. placeholders: top-level packages that are none of
    the peer's. values: {dotted name: {attribute: value}}, put into placeholder modules.
    """

    package: str
    modules: Mapping[str, str]
    placeholders: Sequence[str] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repository: str | None = None
    """Of peers that are no package: its name on GitHub, for the message."""

    @cached_property
    def root(self) -> Path | None:
        """The folder of the package's files; None where there is none."""
        probe = next(iter(self.modules.values()))
        if self.repository is None:
            spec = find_spec(self.package)
            places = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
        else:
            folder = os.environ.get(FOLDER)
            places = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        return next((place for place in places if (place / probe).is_file()), None)

    @property
    def missing(self) -> str | None:
        """Why nothing can be compared; None where it can."""
        if self.root is not None:
            return None
        if self.repository is None:
            return f"{self.package} is not installed here; `make parity` installs it (requirements/peers.txt)"
        return f"{FOLDER} names no folder with a checkout of {self.repository}"

    def load(self) -> dict[str, ModuleType]:
        """The real modules by their dotted name."""
        with self.importing():
            return {name: importlib.import_module(name) for name in self.modules}

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Real and placeholder modules are found; torch.compile leaves functions as they are written.

        Placeholders of other packages are gone afterwards, since other code asks whether these are installed.
        """
        before, compile_, finder = set(sys.modules), torch.compile, _Finder(self, self.root)
        sys.meta_path.insert(0, finder)
        torch.compile = _as_written
        try:
            yield
        finally:
            torch.compile = compile_
            sys.meta_path.remove(finder)
            for name in set(sys.modules) - before:
                if name.split(".")[0] in self.placeholders:
                    del sys.modules[name]


class _Finder(MetaPathFinder):
    def __init__(self, source: Source, root: Path | None) -> None:
        self.source, self.root, self.loader = source, root, _PlaceholderLoader(source)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        source, root = self.source, self.root
        if name in source.modules and root is not None:
            return spec_from_file_location(name, root / source.modules[name])
        if name.split(".")[0] in (source.package, *source.placeholders):
            return ModuleSpec(name, self.loader, is_package=True)
        return None


class _PlaceholderLoader(Loader):
    def __init__(self, source: Source) -> None:
        self.source = source

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = PlaceholderModule(spec.name)
        for name, value in self.source.values.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _as_written(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return function or (lambda decorated: decorated)
