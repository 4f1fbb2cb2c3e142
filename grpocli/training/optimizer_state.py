"""The optimizer's state in a checkpoint: whole tensors under their parameters' names, however processes share them.

Laid out as transformers lays out weights: safetensors files and an index. A tensor `NAME.exp_avg` belongs to the
parameter `NAME`. So any number of processes, and any `hardware.parallel`, can go on from it; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpocli.training.policy import Policy

INDEX = "optimizer.safetensors.index.json"
FILE_BYTES = 2**31
"""A file is written when it has so much: what the main process holds of the state at a time."""


def trained(policy: Policy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that the optimizer changes, in the one order of every process."""
    return ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)


def whole(policy: Policy, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, one at a time. Every process walks through it, to its end."""
    for name, parameter in trained(policy):
        for kind, tensor in policy.parallel.moments(optimizer, parameter):
            yield f"{name}.{kind}", tensor


def write(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write what `whole` yields. In the main process alone."""
    from safetensors.torch import save_file

    files: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"optimizer-{len(set(files.values())) + 1:05}.safetensors"
        save_file(waiting, folder / file)
        files.update(dict.fromkeys(waiting, file))
        waiting.clear()

    for name, tensor in tensors:
        waiting[name] = tensor.cpu().contiguous()
        if sum(t.nbytes for t in waiting.values()) >= FILE_BYTES:
            flush()
    if waiting:
        flush()
    (folder / INDEX).write_text(json.dumps({"weight_map": files}, indent=2))


def restore(folder: Path, policy: Policy, optimizer: Any) -> None:
    """Set the state to what was written. Raises ValueError where it does not fit, or cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        with ExitStack() as closing:
            opened = {
                file: closing.enter_context(safe_open(folder / file, framework="pt")) for file in set(files.values())
            }
            unknown = {name.rpartition(".")[0] for name in files} - {name for name, _ in trained(policy)}
            if unknown:
                raise ValueError(f"there is optimizer state for {min(unknown)}, which is not trained")
            for name, parameter in trained(policy):
                names = [n for n in files if n.rpartition(".")[0] == name]
                # none for a weight that has never had a gradient
                state = {n.rpartition(".")[2]: opened[files[n]].get_tensor(n) for n in names}
                policy.parallel.remember(optimizer, parameter, state)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"optimizer: {error}") from error
