"""Tokens, floating-point operations and seconds of a step, and what it would wait for most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpocli.plan.memory import PlanInputs, sampled_rows, sequence_bytes
from grpocli.plan.placement import FLOAT32_SLOWER, GIB

if TYPE_CHECKING:
    from grpocli.plan.memory import Device
    from grpocli.plan.placement import Placement

EFFICIENCY = 0.4
"""Share of the devices' peak that matrix products of training reach."""
READING = 0.6
"""Share of the memory's bandwidth that decoding reaches."""
LINK = 25e9
"""Bytes a second from trainer to server: a fast network's; within a machine it is more."""
LARGE = 70 * GIB
"""The GPU memory from which vLLM's default of max_num_seqs is larger."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of a step whose prompts and completions all have the longest length. FLOPs of the whole run's devices together.

    seconds: of its parts, as if they came one after the other.
    """

    completions: int
    tokens: int
    generated: int
    forward: float
    backward: float
    generation: float
    sync_bytes: float
    seconds: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=lambda part: self.seconds[part])


def work(needs: PlanInputs, devices: list[Device]) -> Work:
    run, shape, place = needs.run, needs.shape, needs.place
    prompt, completion = run.rollout.max_prompt_tokens, run.rollout.max_completion_tokens
    rows = run.rollout.prompts_per_step * run.rollout.group_size
    prompts = run.rollout.prompts_per_step
    of_prompt, of_row = forward_flops(needs, prompt, 0), forward_flops(needs, prompt, completion)
    generation = prompts * of_prompt + rows * (of_row - of_prompt)  # prompts once for their groups
    once = generation if needs.packed else rows * of_row
    forward, backward = _passes(needs)
    head = run.train.epochs * 2 * shape.head * rows * completion  # a backward computes the logits again
    speed = place.tflops * 1e12 * EFFICIENCY / (FLOAT32_SLOWER[place.kind] if needs.dtype_bytes == 4 else 1)
    computers = place.trainers if place.gpu else 1
    generators = (place.servers * place.tensor_parallel or computers) if place.gpu else 1
    sent = 0.0 if _in_process(needs) else needs.dtype_bytes * (shape.adapter or shape.parameters)
    return Work(
        completions=rows,
        tokens=(prompts if needs.packed else rows) * prompt + rows * completion,
        generated=rows * completion,
        forward=forward * once,
        backward=backward * once + head,
        generation=generation,
        sync_bytes=sent,
        seconds={
            "training: compute": ((forward + backward) * once + head) / (speed * computers),
            "generation: compute": generation / (speed * generators),
            "generation: memory bandwidth of decoding": decoding_bytes(needs, devices)
            / (place.bandwidth * 1e12 * READING),
            "weight sync": sent / (LINK if place.gpu else place.bandwidth * 1e12 / 4),
        },
    )


def forward_flops(needs: PlanInputs, prompt: int, completion: int) -> float:
    """Of one row: two for each multiplied parameter and token (the head: completion tokens alone), and attention."""
    shape, length = needs.shape, prompt + completion
    attention = 2 * shape.layers * shape.attention_width * length**2  # two products over half the pairs of tokens
    return 2 * shape.multiplied * length + 2 * shape.head * completion + attention


def _passes(needs: PlanInputs) -> tuple[float, float]:
    """How often a step computes a forward, and how many forwards its backward passes cost.

    A backward is two forwards: gradients of activations and of weights, the latter of trained ones only.
    """
    run, train = needs.run, needs.run.train
    scoring = float(run.algorithm.needs_reference)
    scoring += 1 if run.algorithm.tokens.needs_entropy else (train.minibatches - 1) / train.minibatches
    again = train.epochs if train.gradient_checkpointing else 0
    weights = 1 if not run.model.lora.rank else 0
    return scoring + train.epochs + again, train.epochs * (1 + weights)


def decoding_bytes(needs: PlanInputs, devices: list[Device]) -> float:
    """Bytes that the busiest device reads of weights and cache to generate its share, a token of each row at a time."""
    run, shape, place = needs.run, needs.shape, needs.place
    copies = place.servers or (place.trainers if place.gpu else 1)
    rows = math.ceil(run.rollout.prompts_per_step * run.rollout.group_size / copies)
    at_once = max(1, min(rows, _running(needs, devices)))
    rounds = math.ceil(rows / at_once)
    weights = needs.dtype_bytes * (shape.multiplied + shape.head)
    cache = at_once * sequence_bytes(needs) * (1 + run.rollout.max_prompt_tokens / _length(needs)) / 2
    return rounds * run.rollout.max_completion_tokens * (weights + cache) / place.tensor_parallel


def _running(needs: PlanInputs, devices: list[Device]) -> int:
    if _in_process(needs) and hasattr(needs.engine, "max_rows"):
        return sampled_rows(needs)
    limit = getattr(needs.engine, "vllm_args", {}).get("max_num_seqs") or _default_max_num_seqs(needs.place)
    caches = [item for device in devices for item in device.items if item.name == "vLLM: KV cache"]
    room = caches[0].generation * needs.place.tensor_parallel / sequence_bytes(needs) if caches else limit
    return int(min(limit, max(1, room)))


def _default_max_num_seqs(place: Placement) -> int:
    """vLLM 0.32's default of max_num_seqs for a server (its `engine/arg_utils.py`)."""
    if not place.gpu:
        return 128
    return 1024 if place.memory >= LARGE else 256


def _length(needs: PlanInputs) -> int:
    return int(needs.run.rollout.longest_row)


def _in_process(needs: PlanInputs) -> bool:
    """Whether the trainer's own weights generate, without a sync to anywhere."""
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers

    return isinstance(needs.engine, Transformers | Fake)
