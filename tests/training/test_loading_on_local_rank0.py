"""One process of each machine reads the weights; in the others they use no memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from grpocli.distributed.fsdp2 import LOADING, loading_on_local_rank0


def resident() -> int:
    """The memory of this process in bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_weights_that_are_not_read_use_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers creates them so in all processes but the first."""
    for name in LOADING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    weight, before = torch.empty(2**26, device="meta"), resident()
    with loading_on_local_rank0():
        assert {name: os.environ[name] for name in LOADING} == LOADING
        here = torch.zeros_like(weight, device="cpu")
    assert not LOADING.keys() & os.environ.keys()
    assert here.nbytes == 2**28
    assert resident() - before < here.nbytes / 4
    assert torch.zeros_like(here[:9]).eq(0).all()
