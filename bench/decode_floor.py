"""What a token of W1 costs: the sampler, and bare forwards, eager and compiled: `python bench/decode_floor.py`.

All of them decode 64 rows of W1's model on one thread. The bare loop has nothing but the forward on a cache of fixed
size and an argmax: what it takes is torch's and transformers' own. Compiled, it is one graph without Python between
operations. Figures are CPU seconds, which other programs disturb less than wall time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "side_by_side"))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from workloads import WORKLOADS, make_model

from grpocli.rollout.sampler import cache_argument, float32_attention, sample
from grpocli.types import Request, Sampling

WORK = WORKLOADS["W1"]
ROWS, LENGTH = WORK.groups * WORK.rows, WORK.prompt + WORK.longest
TIMES = 5


def autocast(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


def sampler(model: Any, dtype: torch.dtype) -> Callable[[], None]:
    """The sampler as `engine=transformers` calls it."""
    requests = [Request(list(range(3, 3 + WORK.prompt)), WORK.rows, seed) for seed in range(WORK.groups)]

    def run() -> None:
        with torch.no_grad(), autocast(dtype), float32_attention(model):
            sample(model, requests, Sampling(WORK.longest), [1], 0)

    return run


def bare(model: Any, dtype: torch.dtype, compiled: bool) -> Callable[[], None]:
    """As many forwards of one token for each row, and an argmax."""
    from transformers import StaticCache

    def forward(token_B1: torch.Tensor, position_1: torch.Tensor, cache: Any, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=token_B1,
            position_ids=position_1.view(1, 1).expand(ROWS, 1),
            attention_mask=mask,
            **{cache_argument(type(model).forward): cache},
            use_cache=True,
            cache_position=position_1,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    step: Callable[..., Any] = torch.compile(forward, dynamic=False) if compiled else forward
    masks = torch.where(torch.ones(LENGTH, LENGTH).tril().bool(), 0.0, float("-inf")).to(dtype)

    def run() -> None:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        token_B1 = torch.full((ROWS, 1), 3)
        with torch.no_grad():
            for at in range(WORK.prompt - 1, LENGTH - 1):
                token_B1 = step(token_B1, torch.tensor([at]), cache, masks[at].view(1, 1, 1, LENGTH))

    return run


def milliseconds(run: Callable[[], None]) -> tuple[float, float]:
    """CPU milliseconds of a token, and the seconds of the first call."""
    start = time.process_time()
    run()
    first, start = time.process_time() - start, time.process_time()
    for _ in range(TIMES):
        run()
    return 1000 * (time.process_time() - start) / TIMES / WORK.longest, first


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(WORK.model, folder)
        from transformers import AutoModelForCausalLM

        print("| | ms a token | s of the first call |\n|---|---|---|")
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            each = {f"the sampler, {name}": sampler(model, dtype)}
            plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            each |= {
                f"bare forwards, {name}, {how}": bare(plain, dtype, how == "compiled") for how in ("eager", "compiled")
            }
            for what, run in each.items():
                print("| {} | {:.2f} | {:.1f} |".format(what, *milliseconds(run)), flush=True)


if __name__ == "__main__":
    main()
