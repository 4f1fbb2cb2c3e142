"""Too little memory is told as such, and an error of another kind is not."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from grpocli.errors import RunError
from grpocli.launch.trainer_process import as_grpo_error
from grpocli.models.loading import _explained
from grpocli.processes import memory
from grpocli.tracking.run_dir import RunDir


class OutOfMemoryError(RuntimeError):
    """As torch calls the one of a GPU."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OSError"),
        (ImportError("libarrow.so: failed to map segment from shared object"), "failed to map"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            "CPUAllocator",
        ),
        (RuntimeError("unable to start watchdog thread"), "watchdog"),
        (RuntimeError("can't start new thread"), "thread"),
        (RuntimeError("std::bad_alloc"), "bad_alloc"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), r"train\.micro_batch_tokens"),
        (ImportError("no module named x"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), ""),
    ],
)
def test_errors_that_mean_too_little_memory(error: Exception, said: str, tmp_path: Path) -> None:
    wrapped = RuntimeError("importing failed")
    wrapped.__cause__ = error
    if not said:
        assert memory.too_little(wrapped) is None
        return
    for one in (error, wrapped):
        told = str(as_grpo_error(one, RunDir(tmp_path)))
        assert told.startswith("too little memory: ")
        assert "a bug" not in told
    with pytest.raises(RunError, match=said), _explained(str(tmp_path), "model"):
        raise wrapped


def test_a_limit_below_the_libraries_is_refused_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.check_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**9, resource.RLIM_INFINITY))
    with pytest.raises(RunError, match=r"`ulimit -v` allows 1\.00 GB"):
        memory.check_limit()
