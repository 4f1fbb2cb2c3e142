"""Imports vLLM and loads the kernels of its platform."""

from __future__ import annotations

import json
import os
import time


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    began = time.monotonic()
    import vllm

    print(json.dumps({"version": vllm.__version__, "seconds": time.monotonic() - began}), flush=True)
    from vllm.platforms import current_platform

    print(json.dumps({"platform": type(current_platform).__name__, "device": current_platform.device_type}), flush=True)
    current_platform.import_kernels()
    print(json.dumps({"kernels": loaded_kernels()}), flush=True)
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    # as `VllmConfig.use_v2_model_runner` decides without speculation, which takes 5 s to build
    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    print(json.dumps({"second_runner": HAS_TRITON if chosen is None else chosen}), flush=True)


def loaded_kernels() -> list[str]:
    """The names of vLLM's operators that torch knows now."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith(("_C::", "_C_cache_ops::", "_C_cpu::")))[:400]


if __name__ == "__main__":
    main()
