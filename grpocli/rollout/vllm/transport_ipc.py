"""CUDA IPC handles as JSON: what `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes, without pickle."""

from __future__ import annotations

import base64
from typing import Any

import torch

TYPES: dict[str, type] = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "UntypedStorage": torch.UntypedStorage,
    "TypedStorage": torch.storage.TypedStorage,
}
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ARGUMENTS = 15
"""tensor type, size, stride, offset, storage type, dtype, device, handle, storage size and offset, requires_grad, then
the reference counter's handle and offset, the event's handle, and whether to wait for it."""

Handles = dict[str, tuple[Any, ...]]


def encode_handles(handles: Handles) -> dict[str, list[Any]]:
    """The arguments for each GPU (by its UUID) in JSON's types. Raises ValueError for what is not in the lists here."""
    return {uuid: [_encode(argument) for argument in arguments] for uuid, arguments in handles.items()}


def decode_handles(handles: Any) -> Handles:
    """The inverse of `encode_handles`. Raises ValueError for anything that is not its output."""
    if not isinstance(handles, dict):
        raise ValueError("IPC handles come as one object for each GPU")
    decoded = {str(uuid): tuple(_decode(argument) for argument in arguments) for uuid, arguments in handles.items()}
    if any(len(arguments) != ARGUMENTS for arguments in decoded.values()):
        raise ValueError(f"an IPC handle has {ARGUMENTS} parts")
    return decoded


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):  # torch.Size too
        return {"ints": [int(item) for item in value]}
    for kind, known in (("type", TYPES), ("dtype", DTYPES)):
        for name, item in known.items():
            if item is value:
                return {kind: name}
    raise ValueError(f"{value!r} is not part of an IPC handle")


def _decode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    match value:
        case {"bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case {"ints": list(items)} if all(type(item) is int for item in items):
            return tuple(items)
        case {"type": str(name)} if name in TYPES:
            return TYPES[name]
        case {"dtype": str(name)} if name in DTYPES:
            return DTYPES[name]
    raise ValueError(f"{value!r} is not part of an IPC handle")
