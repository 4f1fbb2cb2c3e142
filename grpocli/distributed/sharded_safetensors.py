"""Safetensors files of whole tensors with an index, as transformers has them, written and read by all processes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from grpocli.files import sync_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
FILE_BYTES = 2**31
"""Size of a complete file, and of the memory that a process uses for it."""

Convert = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]


class Processes(Protocol):
    """The part of `World` that writing needs."""

    rank: int
    size: int

    def gather_objects(self, items: Sequence[T]) -> list[T]:
        """Every process's items, in rank order. Collective."""


def write(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    stem: str,
    world: Processes,
    dtype: torch.dtype | None = None,
    convert: Convert | None = None,
) -> dict[str, str]:
    """Write `STEM-00001.safetensors` and so on, in turn; return the file of each tensor. Collective.

    tensors: whole tensors, the same in every process; they may be gathered one by one while they are iterated. dtype:
    for floating-point tensors (None: their own). convert: applied to the tensors of each file, names included.
    """
    from safetensors.torch import save_file

    files: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    number, size, waiting = 0, 0, False

    def flush() -> None:
        if pending:
            name = f"{stem}-{(number - 1) // world.size * world.size + world.rank + 1:05}.safetensors"
            written = convert(pending) if convert else pending
            save_file(written, folder / name, metadata={"format": "pt"})
            sync_path(folder / name)  # by its writer: the main process may be on another machine
            files.update(dict.fromkeys(written, name))
            pending.clear()

    for name, tensor in tensors:
        to = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        if number % world.size == world.rank:
            pending[name] = tensor.detach().to("cpu", to).contiguous()
        size, waiting = size + tensor.numel() * to.itemsize, True
        if size >= FILE_BYTES:
            number, size, waiting = number + 1, 0, False
            if number % world.size == 0:  # every process has a full file: all write at once
                flush()
    number += waiting
    flush()
    return dict(world.gather_objects(list(files.items())))


def writer(name: str, processes: int) -> int:
    """The rank that wrote a file; the main process wrote all that `write` did not."""
    numbered = re.search(r"-(\d{5,})\.safetensors$", name)
    return (int(numbered[1]) - 1) % processes if numbered else 0


def write_index(files: dict[str, str], path: Path) -> None:
    """Write the index of the files of `write`."""
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(sorted(files.items()))}, indent=2))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; parts of it can be read without the rest."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def whole(self) -> Tensor:
        return self.file.get_tensor(self.name)  # type: ignore[no-any-return]

    def rows(self, start: int, end: int) -> Tensor:
        """Rows [start, end) of the first dimension."""
        return self.file.get_slice(self.name)[start:end]  # type: ignore[no-any-return]

    def flat(self, start: int, end: int) -> Tensor:
        """Elements [start, end) of the flattened tensor; fewer at its end."""
        first, *rest = self.shape
        row = math.prod(rest)
        top = min(start // row, first)
        rows = self.rows(top, min(-(-end // row), first)).flatten()
        return rows[max(start - top * row, 0) : max(end - top * row, 0)]


@contextmanager
def reading(index: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of an index's files by name. Raises ValueError if it names a file of another folder."""
    from safetensors import safe_open

    files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    if elsewhere := [file for file in files.values() if Path(file).name != file]:
        raise ValueError(f"{index.name} names {elsewhere[0]}, which is not a file beside it")
    with ExitStack() as closing:
        opened = {
            file: closing.enter_context(safe_open(index.parent / file, framework="pt")) for file in set(files.values())
        }
        yield {name: StoredTensor(opened[file], name) for name, file in files.items()}
