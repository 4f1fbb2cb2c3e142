"""Too little memory is told as such, and an error of another kind is not."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from grpocli.config.user_code import too_little_memory
from grpocli.errors import RunError
from grpocli.launch.trainer_process import as_grpo_error
from grpocli.models.loading import HuggingFace, load_tokenizer
from grpocli.runs.run_dir import RunDir


class OutOfMemoryError(RuntimeError):
    """As torch calls the one of a GPU."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OSError"),
        (ImportError("libarrow.so: failed to map segment from shared object"), "failed to map"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "CPUAllocator"),
        (RuntimeError("can't start new thread"), "thread"),
        (RuntimeError("std::bad_alloc"), "bad_alloc"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), r"train\.micro_batch_tokens"),
        (ImportError("no module named x"), ""),
        (ValueError("the model ran out of memory"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), ""),
    ],
)
def test_errors_that_mean_too_little_memory(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = RuntimeError("importing failed")
    wrapped.__cause__ = error
    if not said:
        assert too_little_memory(wrapped) is None
        return
    for one in (error, wrapped):
        told = str(as_grpo_error(one, RunDir(tmp_path)))
        assert told.startswith("too little memory: ")
        assert "a bug" not in told
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Mock(side_effect=wrapped))
    with pytest.raises(RunError, match=said):
        load_tokenizer(HuggingFace(path=str(tmp_path)), str(tmp_path))


def test_an_error_of_user_code_is_told_with_its_line() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("the calculator is out of memory")
    assert too_little_memory(raised.value) is None
