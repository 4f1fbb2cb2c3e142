"""A model's weights are read from disk by one process of each machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LOADING = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
"""Has transformers read weights in one process of each machine only; in the others they are zeros."""


class _Untouched(TorchFunctionMode):
    """Memory that nobody has written to takes no room: zeros do, and as many as a whole model's."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (torch.empty_like if func is torch.zeros_like else func)(*args, **(kwargs or {}))


def reads() -> bool:
    """Whether this is the process that reads for its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def read_once() -> Iterator[None]:
    """While models are loaded. In all but the first process of a machine their weights and buffers are anything: who
    uses this hands out those of the main process.
    """
    before = {name: os.environ.get(name) for name in LOADING}
    os.environ.update(LOADING)
    try:
        with nullcontext() if reads() else _Untouched():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
