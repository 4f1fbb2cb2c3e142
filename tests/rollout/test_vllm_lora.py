"""Server options for LoRA, and refused servers and adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout.vllm_tiny import Alone

from grpocli.errors import ConfigError
from grpocli.rollout.engine import EngineContext
from grpocli.rollout.vllm import lora
from grpocli.rollout.vllm.client import ServerGone
from grpocli.rollout.vllm.lora import AdapterSync, lora_flags


def test_the_first_of_several_failures_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies during a load also fails to resume."""

    class Dies:
        def adapters(self) -> dict[str, Path]:
            return {}

        def weight_version(self) -> int:
            return 0

        def pause(self, mode: str) -> None:
            raise ServerGone("it died during /pause")

        def resume(self) -> None:
            raise ServerGone("it is gone (/resume)")

    monkeypatch.setattr(lora, "adapter_tensors", lambda model: [])
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50))
    policy = SimpleNamespace(model=SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)])))
    job = SimpleNamespace(dtype="float32", quantized=False, gpus=(), max_tokens=40)
    context: Any = EngineContext(job, policy, object(), Alone())  # type: ignore[arg-type]
    with pytest.raises(ServerGone, match="it died during /pause"):
        AdapterSync([Dies()], context)._send(1, set())  # type: ignore[list-item]


def test_ranks_and_dtypes_that_vllm_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model\.lora\.rank=513: vLLM serves ranks up to 512"):
        lora_flags(513, "bfloat16", cpu=True)
    with pytest.raises(ConfigError, match=r"^model\.dtype=float32: .* take bfloat16"):
        lora_flags(8, "float32", cpu=False)
    assert lora_flags(8, "bfloat16", cpu=False)
