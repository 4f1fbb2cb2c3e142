"""The folder of weights for servers on other machines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpocli.launch.run import shared_folder
from grpocli.runs.run_dir import RunDir


@pytest.mark.parametrize(
    ("nodes", "transport", "rank", "shared"),
    [(0, "shm", 0, False), (1, "shm", 0, True), (1, "nccl", 0, False), (1, "nccl", 8, True), (0, "nccl", 8, False)],
)
def test_files_for_other_machines_are_in_the_run_folder(
    tmp_path: Path, nodes: int, transport: str, rank: int, shared: bool
) -> None:
    run: Any = SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=rank)))
    folder = shared_folder(run, RunDir(tmp_path), nodes, transport)
    assert (folder is not None) == shared
    assert folder is None or Path(folder).is_relative_to(tmp_path)
