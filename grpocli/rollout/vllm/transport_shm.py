"""sync=shm: buckets of weights in files that trainer and servers map, in memory or in a folder that machines share."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpocli.errors import EngineError
from grpocli.rollout.vllm.endpoint import SHM
from grpocli.rollout.vllm.transport import Meta, Weights, each, prepare
from grpocli.rollout.vllm.weights import BucketFile, bucket_counts, file_size

if TYPE_CHECKING:
    from grpocli.rollout.vllm.protocol import Server

SLOTS = 2  # one is written while the servers load the other

Files = dict[Path, BucketFile]


class ShmTransport:
    """Buckets are written while the servers load the ones before; servers that share a folder share the files.

    In shared memory the files are made once and written in place from then on: pages of new memory cost more than the
    copy. Their names are gone as soon as the servers have mapped them, so nothing can be left behind. Elsewhere (a
    folder that machines share, a disk) two machines need not see what the other writes into a mapping, and every
    bucket is a new file.
    """

    everywhere = False

    def __init__(self, weights: Weights, bucket: int) -> None:
        """bucket: bytes."""
        self.weights, self.bucket = weights, bucket
        self._slots: list[Files] = []
        self._sent: list[list[Meta]] = []  # the plan for which the slots are made, and the servers have mapped them

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        plan = self._plan()
        groups = by_folder(servers)
        if plan != self._sent or not all(server.prepared for server in servers):
            self.close()
            prepare(servers, [{} for _ in servers])
        self._sent = []
        self._make_slots(groups, plan)
        each(servers, lambda server: server.start_update())
        self._send_buckets(plan, groups, weights)
        each(servers, lambda server: server.finish_update(version))
        self._sent = plan
        return self.weights.bytes()

    def close(self) -> None:
        for file in [file for files in self._slots for file in files.values()]:
            file.unlink()  # where no server has mapped it
        self._slots = []

    def _plan(self) -> list[list[Meta]]:
        """The parameters of each bucket."""
        shapes = iter(metadata := self.weights.metadata())
        return [list(islice(shapes, count)) for count in bucket_counts(metadata, self.weights.dtype, self.bucket)]

    def _send_buckets(
        self,
        plan: list[list[Meta]],
        groups: dict[Path, list[Server]],
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        loads: list[Future[None]] = []
        with ThreadPoolExecutor(1) as loading:
            for index, shapes in enumerate(plan):
                if index >= SLOTS:
                    loads[index - SLOTS].result()
                files = self._slots[index % SLOTS] if self._slots else make_files(groups, [shapes], self.weights.dtype)
                first, *others = files.values()
                first.write(shapes, (tensor for _, tensor in islice(weights, len(shapes))), self.weights.dtype)
                for other in others:
                    other.copy(first)
                for file in [] if self._slots else files.values():
                    file.flush()
                loads.append(loading.submit(_load, files, groups, bool(self._slots)))
        for load in loads:
            load.result()

    def _make_slots(self, groups: dict[Path, list[Server]], plan: list[list[Meta]]) -> None:
        """In shared memory, and before any server begins an update: there may be no room for them."""
        if self._slots or not all(in_memory(folder) for folder in groups):
            return
        try:
            for slot in range(min(SLOTS, len(plan))):
                self._slots.append(make_files(groups, plan[slot::SLOTS], self.weights.dtype))
        except EngineError:
            self.close()
            raise


def make_files(groups: Iterable[Path], buckets: Iterable[list[Meta]], dtype: torch.dtype) -> Files:
    """In each folder a file that has room for any one of the buckets. Raises EngineError, and leaves none, where there
    is no space."""
    size = max(file_size(shapes, dtype) for shapes in buckets)
    files: Files = {}
    try:
        for folder in groups:
            files[folder] = BucketFile(folder / f"weights-{secrets.token_hex(8)}.safetensors", size)
    except EngineError:
        for file in files.values():
            file.unlink()
        raise
    return files


def _load(files: Files, groups: dict[Path, list[Server]], keep: bool) -> None:
    folders = {id(server): folder for folder, servers in groups.items() for server in servers}
    servers = [server for group in groups.values() for server in group]
    try:
        each(servers, lambda server: server.update({"file": files[folders[id(server)]].path.name, "keep": keep}))
    finally:
        for file in files.values():
            file.unlink()


def by_folder(servers: Sequence[Server]) -> dict[Path, list[Server]]:
    groups: dict[Path, list[Server]] = {}
    for server in servers:
        groups.setdefault(Path(server.endpoint.shm_dir), []).append(server)
    return groups


def in_memory(folder: Path) -> bool:
    """Whether the folder is this machine's shared memory."""
    return folder.resolve().is_relative_to(SHM)
