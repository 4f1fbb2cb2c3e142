"""Tokens, floating-point operations and seconds of a step, and its bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpocli.algorithm.kl import has_teacher
from grpocli.plan.memory import FLOAT32, PlanInputs, sampled_rows, sequence_bytes
from grpocli.plan.resources import FLOAT32_SLOWER, GIB

if TYPE_CHECKING:
    from grpocli.plan.memory import Device
    from grpocli.plan.model_size import ModelSize
    from grpocli.plan.resources import Resources

EFFICIENCY = 0.4
"""Share of peak FLOP/s that matrix products of training reach."""
READING = 0.6
"""Share of the memory bandwidth that decoding reaches."""
LINK = 25e9
"""Bytes per second from trainer to server, over a fast network; within a machine it is more."""
LARGE = 70 * GIB
"""GPU memory in bytes from which vLLM's default of max_num_seqs is larger."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step in which all prompts and completions have full length.

    tokens: trained. generated: tokens. forward, backward, generation: FLOPs of all devices together. seconds: of each
    part, without overlap.
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


def work(inputs: PlanInputs, devices: list[Device]) -> Work:
    run, size, resources = inputs.run, inputs.size, inputs.resources
    prompt, completion = run.rollout.max_prompt_tokens, run.rollout.max_completion_tokens
    rows = run.rollout.prompts_per_step * run.rollout.group_size
    prompts = run.rollout.prompts_per_step
    of_prompt, of_row = forward_flops(size, prompt, 0), forward_flops(size, prompt, completion)
    generation = prompts * of_prompt + rows * (of_row - of_prompt)  # each prompt once for its group
    supervised = run.algorithm.supervised  # its completions are the data's
    once = generation if inputs.packed else rows * of_row
    forward, backward = _passes(inputs)
    head = run.train.epochs * 2 * size.head * rows * completion  # the backward pass recomputes the logits
    slower = FLOAT32_SLOWER[resources.kind]
    speed = resources.tflops * 1e12 * EFFICIENCY / (slower if inputs.dtype_bytes == 4 else 1)
    more = _extra_head_flops(inputs, forward, backward, head)
    computers = resources.trainers if resources.gpu else 1
    generators = (resources.servers * resources.tensor_parallel or computers) if resources.gpu else 1
    syncs = not (_in_process(inputs) or supervised)
    sent = inputs.dtype_bytes * (size.adapter or size.parameters) if syncs else 0.0
    return Work(
        completions=rows,
        tokens=(prompts if inputs.packed else rows) * prompt + rows * completion,
        generated=0 if supervised else rows * completion,
        forward=forward * once,
        backward=backward * once + head,
        generation=0.0 if supervised else generation,
        sync_bytes=sent,
        seconds={
            "training: compute": ((forward + backward) * once + head + more) / (speed * computers),
            "generation: compute": 0.0 if supervised else generation / (speed * generators),
            "generation: memory bandwidth of decoding": 0.0
            if supervised
            else decoding_bytes(inputs, devices) / (resources.bandwidth * 1e12 * READING),
            "weight sync": sent / (LINK if resources.gpu else resources.bandwidth * 1e12 / 4),
        },
    )


def _extra_head_flops(inputs: PlanInputs, forward: float, backward: float, again: float) -> float:
    """FLOPs in the dtype of the computation that take as long as what a float32 head takes longer.

    forward, backward: as of `_passes`. again: FLOPs of logits that are recomputed. A CPU multiplies in float32; a GPU
    multiplies the same operands into float32 sums, and gradients in two parts (`models/head.py`).
    """
    if not inputs.wide_head:
        return 0.0
    rollout = inputs.run.rollout
    once = 2 * inputs.size.head * rollout.prompts_per_step * rollout.group_size * rollout.max_completion_tokens
    if inputs.resources.gpu:
        return backward * once
    return (FLOAT32_SLOWER[inputs.resources.kind] - 1) * ((forward + backward) * once + again)


def forward_flops(size: ModelSize, prompt: int, completion: int) -> float:
    """FLOPs of a row: two per token and multiplied parameter (head: completion tokens only), and attention."""
    length = prompt + completion
    attention = 2 * size.layers * size.attention_width * length**2  # two products over half the pairs of tokens
    return 2 * size.multiplied_by_a_token * length + 2 * size.head * completion + attention


def _passes(inputs: PlanInputs) -> tuple[float, float]:
    """Forward passes of a step, and its backward passes in units of a forward pass.

    A backward pass costs two: gradients of activations, and of weights unless LoRA freezes them.
    """
    run, train = inputs.run, inputs.run.train
    scoring = _reference_passes(inputs)
    scoring += 1 if run.algorithm.tokens.needs_entropy else (train.minibatches - 1) / train.minibatches
    again = train.epochs if train.gradient_checkpointing else 0
    weights = 1 if not run.model.lora.rank else 0
    return scoring + train.epochs + again, train.epochs * (1 + weights)


def _reference_passes(inputs: PlanInputs) -> float:
    """Forward passes of the reference, in units of the policy's; of several teachers each scores its share of rows."""
    run = inputs.run
    if not has_teacher(run.algorithm.kl):
        return float(run.algorithm.needs_reference)
    lengths = run.rollout.max_prompt_tokens, run.rollout.max_completion_tokens
    own = forward_flops(inputs.size, *lengths)
    passes = [forward_flops(teacher, *lengths) / own for teacher in inputs.teachers]
    servers = len(set(run.algorithm.kl.urls.values()))
    return sum(passes) / (len(passes) + servers) if passes else 0.0


def decoding_bytes(inputs: PlanInputs, devices: list[Device]) -> float:
    """Bytes of weights and cache that the busiest device reads to generate its share, one token per row at a time."""
    run, size, resources = inputs.run, inputs.size, inputs.resources
    copies = resources.servers or (resources.trainers if resources.gpu else 1)
    rows = math.ceil(run.rollout.prompts_per_step * run.rollout.group_size / copies)
    at_once = max(1, min(rows, _running(inputs, devices)))
    rounds = math.ceil(rows / at_once)
    head = _head_bytes(inputs) * size.head
    weights = inputs.dtype_bytes * size.multiplied + head
    cache = at_once * sequence_bytes(inputs) * (1 + run.rollout.max_prompt_tokens / _length(inputs)) / 2
    return rounds * run.rollout.max_completion_tokens * (weights + cache) / resources.tensor_parallel


def _head_bytes(inputs: PlanInputs) -> int:
    """Bytes read and written for a number of the output head at each token. vLLM on a CPU casts it each time."""
    if not inputs.wide_head or (inputs.resources.gpu and not _in_process(inputs)):
        return inputs.dtype_bytes
    return FLOAT32 if _in_process(inputs) else inputs.dtype_bytes + 2 * FLOAT32


def _running(inputs: PlanInputs, devices: list[Device]) -> int:
    if _in_process(inputs) and hasattr(inputs.engine, "max_rows"):
        return sampled_rows(inputs)
    limit = inputs.engine.max_num_seqs or _default_max_num_seqs(inputs.resources)
    caches = [item for device in devices for item in device.items if item.name == "vLLM: KV cache"]
    room = caches[0].generation * inputs.resources.tensor_parallel / sequence_bytes(inputs) if caches else limit
    return int(min(limit, max(1, room)))


def _default_max_num_seqs(resources: Resources) -> int:
    """vLLM 0.32's default of max_num_seqs for a server (its `engine/arg_utils.py`)."""
    if not resources.gpu:
        return 128
    return 1024 if resources.memory >= LARGE else 256


def _length(inputs: PlanInputs) -> int:
    return int(inputs.run.rollout.longest_row)


def _in_process(inputs: PlanInputs) -> bool:
    """Whether the trainer's own weights generate, without a sync."""
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers

    return isinstance(inputs.engine, Transformers | Fake)
