"""Weights are read by one process of each machine; in the others they take no memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from grpocli.distributed.fsdp2 import LOADING, loading_on_local_rank0


def resident() -> int:
    """Bytes of this process's memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_what_is_not_read_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers makes the weights of all but the first process."""
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
