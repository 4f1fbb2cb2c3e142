"""Programs that load torch or vLLM, or start a sandbox, in separate processes: `probes.py NAME [WORD ...]`.

A broken library ends the program and not `grpocli doctor`. Each program prints JSON objects, one a line, as it goes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec", "flash_attn", "xformers", "bitsandbytes", "triton")
"""Packages with compiled parts that have to fit torch; transformers and vLLM import them if they are installed."""


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def gpu(number: int) -> dict[str, Any]:
    """A GPU as torch sees it, after a product of matrices in float16, which every GPU has."""
    import torch

    found: dict[str, Any] = {"name": torch.cuda.get_device_name(number)}
    try:
        found["free"], found["total"] = torch.cuda.mem_get_info(number)
        ones = torch.ones(16, 16, device=f"cuda:{number}", dtype=torch.float16)
        found["computes"] = float((ones @ ones).sum()) == 16**3
    except Exception as error:  # noqa: BLE001 - the reason is the result
        found["problem"] = " ".join(str(error).split())[:300]
    return found


def torch(*libraries: str) -> None:
    """Import torch and libraries, and compute on every device."""
    began = time.monotonic()
    import torch

    say(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    ones = torch.ones(16, 16, requires_grad=True)
    (ones @ ones).sum().backward()
    say(cpu=ones.grad is not None and bool(torch.all(ones.grad == 32)))
    say(gpus=[gpu(number) for number in range(torch.cuda.device_count())])
    broken = {}
    for name in (*BUILT_FOR_TORCH, *libraries):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        say(importing=name)
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - the reason is the result
            broken[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    say(importing="", broken=broken, seconds=time.monotonic() - began)


def vllm() -> None:
    """Import vLLM and load the kernels of its platform."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    began = time.monotonic()
    import torch
    from vllm.platforms import current_platform

    say(device=current_platform.device_type, seconds=time.monotonic() - began)
    current_platform.import_kernels()
    names = torch._C._dispatch_get_all_op_names()
    say(kernels=any(name.startswith(("_C::", "_C_cache_ops::", "_C_cpu::")) for name in names))


def sandbox(*python: str) -> None:
    """Select the sandbox for programs that a model writes. python: their interpreter."""
    from grpocli.sandbox.backends import select_backend
    from grpocli.sandbox.sandbox import Limits

    say(backend=select_backend(python[0] if python else None, Limits()))


PROGRAMS: dict[str, Callable[..., None]] = {"torch": torch, "vllm": vllm, "sandbox": sandbox}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
