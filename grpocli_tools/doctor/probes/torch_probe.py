"""Imports torch and the libraries that it is given, and computes on every device."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
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
        found["capability"] = list(torch.cuda.get_device_capability(number))
        found["free"], found["total"] = torch.cuda.mem_get_info(number)
        ones = torch.ones(16, 16, device=f"cuda:{number}", dtype=torch.float16)
        found["computes"] = float((ones @ ones).sum()) == 16**3
    except Exception as error:  # noqa: BLE001 - the reason is the result
        found["problem"] = " ".join(str(error).split())[:300]
    return found


def main() -> None:
    began = time.monotonic()
    import torch

    say(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, seconds=time.monotonic() - began)
    ones = torch.ones(16, 16, requires_grad=True)
    (ones @ ones).sum().backward()
    correct = ones.grad is not None and bool(torch.all(ones.grad == 32))
    say(cpu=correct, threads=torch.get_num_threads())
    count = torch.cuda.device_count()
    say(gpus=[gpu(number) for number in range(count)])
    broken = {}
    for name in (*BUILT_FOR_TORCH, *sys.argv[1:]):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        say(importing=name)
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - the reason is the result
            broken[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    say(importing="", broken=broken, whole=time.monotonic() - began)


if __name__ == "__main__":
    main()
