"""A micro-batch's forward and backward with plain and with compiled layers (model.compile), in alternating order.

    python bench/compiled_layers.py [MODEL ...]

Models and rows are those of bench/side_by_side/workloads.py: two groups of eight, prompts of 12 tokens, completions of
about 64. Prints a Markdown row for each model: medians of `ROUNDS`, the ratio of each pair, and what compiling took.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpocli.distributed.world import World
from grpocli.hardware.hardware import Single
from grpocli.training.compiled import compile_layers
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.packing_check import find_head, pack
from grpocli.training.policy import Policy
from grpocli.types import Row, Sampling

sys.path.insert(0, str(Path(__file__).parent / "side_by_side"))
from workloads import MODELS

ROUNDS = 9


def a_policy(config: dict[str, Any], world: World, dtype: torch.dtype) -> Policy:
    given = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.pop("model_type"), **given)).to(world.device)
    policy = Policy(model, model, dtype, world.parallel)
    find_head(policy, world)
    assert pack(policy, None, world)
    return policy


def rows(number: int) -> list[Row]:
    """Completions of 48 to 80 tokens, other ones for each number."""
    draw = random.Random(number)
    prompts = [[draw.randrange(3, 400) for _ in range(12)] for _ in range(2)]
    lengths = [draw.randint(48, 80) for _ in range(16)]
    return [Row(prompts[k // 8], [5 + k] * n, [1] * n, 1.0, k // 8, [0.0] * n) for k, n in enumerate(lengths)]


def seconds(policy: Policy, number: int) -> float:
    batch = MicroBatch.build(rows(number), policy.model.device, policy.layout(Sampling(80)))
    policy.model.zero_grad()
    start = time.perf_counter()
    (policy.scores(batch, Sampling(80)).logp * batch.mask).sum().backward()
    if policy.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("models", nargs="*", metavar="MODEL", choices=MODELS, help=f"of {', '.join(MODELS)}")
    models = cli.parse_args().models or ["0.4M", "smollm2-135m"]
    world = World(Single(device="cuda" if torch.cuda.is_available() else "cpu"))
    print(
        "| model, dtype | plain, s | compiled, s | ratio (smallest to largest) | to compile, s |\n|---|---|---|---|---|"
    )
    for name in models:
        for dtype in (torch.float32, torch.bfloat16):
            plain, compiled = (a_policy(MODELS[name], world, dtype) for _ in range(2))
            start = time.perf_counter()
            compile_layers(compiled, None, world)
            seconds(compiled, 0)
            to_compile = time.perf_counter() - start
            plain.model.train()
            pairs = [(seconds(plain, number), seconds(compiled, number)) for number in range(1, ROUNDS + 1)]
            ratios = sorted(two / one for one, two in pairs)
            first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(
                f"| {name}, {str(dtype).removeprefix('torch.')} | {first:.3f} | {second:.3f} | "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {to_compile:.0f} |",
                flush=True,
            )
            torch.compiler.reset()


if __name__ == "__main__":
    main()
