"""Tokens, floating-point operations and seconds of a step, and its bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpocli.algorithm.kl import has_teacher
from grpocli_tools.plan.efficiency import (
    COMPUTE,
    COSTS,
    DECODE_COSTS,
    HOST,
    Decoding,
    Demand,
    TrainingStep,
    operations,
    training_demand,
)
from grpocli_tools.plan.memory import FLOAT32, PlanInputs, sampled_rows, sequence_bytes
from grpocli_tools.plan.resources import FLOAT32_SLOWER, GIB

if TYPE_CHECKING:
    from grpocli_tools.plan.memory import Device
    from grpocli_tools.plan.model_size import ModelSize
    from grpocli_tools.plan.resources import Resources

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
    prompts, rows = run.rollout.prompts_per_step, run.rollout.prompts_per_step * run.rollout.group_size
    of_prompt, of_row = forward_flops(size, prompt, 0), forward_flops(size, prompt, completion)
    generation = prompts * of_prompt + rows * (of_row - of_prompt)  # each prompt once for its group
    supervised = run.algorithm.supervised  # its completions are the data's
    once = generation if inputs.packed else rows * of_row
    forward, backward = _passes(inputs)
    head = run.train.epochs * 2 * size.head * rows * completion  # the backward pass recomputes the logits
    demand = step_demand(inputs)
    reading, products, launches = (0.0, 0.0, 0.0) if supervised else _decoding_seconds(inputs, devices)
    costs = COSTS[resources.kind]
    return Work(
        completions=rows,
        tokens=(prompts if inputs.packed else rows) * prompt + rows * completion,
        generated=0 if supervised else rows * completion,
        forward=forward * once,
        backward=backward * once + head,
        generation=0.0 if supervised else generation,
        sync_bytes=sync_bytes(inputs),
        seconds={
            "training: compute": max(demand.part(*COMPUTE).seconds(costs), host_seconds(inputs)),
            "training: network": demand.part("network").seconds(costs),
            "generation: compute": products,
            "generation: memory bandwidth of decoding": reading,
            "generation: launches and scheduling": launches,
            "weight sync": sync_seconds(inputs),
        },
    )


def sync_bytes(inputs: PlanInputs) -> float:
    """Bytes sent to the servers after an update."""
    if _in_process(inputs) or inputs.run.algorithm.supervised:
        return 0.0
    return float(inputs.dtype_bytes * (inputs.size.adapter or inputs.size.parameters))


def sync_seconds(inputs: PlanInputs) -> float:
    return sync_bytes(inputs) / (LINK if inputs.resources.gpu else inputs.resources.bandwidth * 1e12 / 4)


def training_step(inputs: PlanInputs, prompt: float | None = None, completion: float | None = None) -> TrainingStep:
    """The update of a step. prompt, completion: mean tokens; None: full length."""
    run, train, rollout = inputs.run, inputs.run.train, inputs.run.rollout
    rows = rollout.prompts_per_step * rollout.group_size
    own, full = completion or rollout.max_completion_tokens, prompt is None and completion is None
    shown = prompt or rollout.max_prompt_tokens
    scoring = _reference_passes(inputs)
    scoring += 1 if run.algorithm.tokens.needs_entropy else (train.minibatches - 1) / train.minibatches
    prompts = rollout.prompts_per_step if inputs.packed else rows
    tokens = (prompts * shown + rows * own) / trainers_of(inputs)
    batches = inputs.micro_batches * train.minibatches
    return TrainingStep(
        rows=rows,
        prompts=prompts,
        prompt=shown,
        completion=own,
        scoring=scoring,
        epochs=train.epochs,
        micro_batches=batches if full else max(train.minibatches, math.ceil(tokens / train.micro_batch_tokens)),
        updates=train.epochs * train.minibatches,
        checkpointing=train.gradient_checkpointing,
        frozen=bool(run.model.lora.rank),
        shards=inputs.shards,
        dtype_bytes=inputs.dtype_bytes,
        shared_by=run.hardware.context_parallel,
        wide_head=inputs.wide_head,
        flash_3=run.model.attention == "flash_attention_3",
        compiled=inputs.compiled,
    )


def trainers_of(inputs: PlanInputs) -> int:
    """Devices that share the products of training: the cores of a CPU are one."""
    return inputs.resources.trainers if inputs.resources.gpu else 1


def slower(inputs: PlanInputs) -> float:
    """How much longer products take than in bfloat16."""
    return FLOAT32_SLOWER[inputs.resources.kind] if inputs.dtype_bytes == FLOAT32 else 1.0


def step_demand(inputs: PlanInputs, prompt: float | None = None, completion: float | None = None) -> Demand:
    """The work of a trainer in a step. prompt, completion: mean tokens; None: full length."""
    step, resources = training_step(inputs, prompt, completion), inputs.resources
    demand = training_demand(inputs.size, step, trainers_of(inputs), resources, slower(inputs))
    more = _extra_head_flops(inputs, step) / trainers_of(inputs)
    return replace(demand, linear=demand.linear + more / (resources.tflops * 1e12))


def host_seconds(inputs: PlanInputs, prompt: float | None = None, completion: float | None = None) -> float:
    """Seconds for which the host starts a step's operations, beside the GPU. prompt, completion: of `step_demand`."""
    return HOST[inputs.resources.kind] * operations(inputs.size, training_step(inputs, prompt, completion))


def _extra_head_flops(inputs: PlanInputs, step: TrainingStep) -> float:
    """FLOPs in the dtype of the computation that take as long as what a float32 head takes longer.

    A CPU multiplies in float32; a GPU multiplies the same operands into float32 sums, and gradients in two parts
    (`models/head.py`).
    """
    if not inputs.wide_head:
        return 0.0
    once, backward = 2 * inputs.size.head * step.rows * step.completion, step.epochs * (1 if step.frozen else 2)
    if inputs.resources.gpu:
        return backward * once
    return (FLOAT32_SLOWER[inputs.resources.kind] - 1) * (step.scoring + 2 * step.epochs + backward) * once


def forward_flops(size: ModelSize, prompt: int, completion: int) -> float:
    """FLOPs of a row: two per token and multiplied parameter (head: completion tokens only), and attention."""
    length = prompt + completion
    attention = 2 * size.layers * size.attention_width * length**2  # two products over half the pairs of tokens
    return 2 * size.multiplied_by_a_token * length + 2 * size.head * completion + attention


def _passes(inputs: PlanInputs) -> tuple[float, float]:
    """Forward passes of a step, and its backward passes in units of a forward pass.

    A backward pass costs two: gradients of activations, and of weights unless LoRA freezes them.
    """
    step = training_step(inputs)
    return step.forward, step.epochs * (1 if step.frozen else 2)


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


def decoding(inputs: PlanInputs, context: float) -> Decoding:
    """The decoding of one server, or of a trainer's own weights. context: mean tokens before the decoded one."""
    resources = inputs.resources
    return Decoding(
        inputs.size,
        resources,
        DECODE_COSTS[resources.kind],
        resources.tensor_parallel,
        inputs.dtype_bytes,
        _head_bytes(inputs),
        context,
        slower(inputs),
    )


def _decoding_seconds(inputs: PlanInputs, devices: list[Device]) -> tuple[float, float, float]:
    """Seconds of reading, of products, and of the rest, in which the busiest server generates its share."""
    rollout = inputs.run.rollout
    copies = inputs.resources.servers or trainers_of(inputs)
    rows = math.ceil(rollout.prompts_per_step * rollout.group_size / copies)
    at_once = max(1, min(rows, running(inputs, devices)))
    tokens = math.ceil(rows / at_once) * rollout.max_completion_tokens
    decoder = decoding(inputs, rollout.max_prompt_tokens + rollout.max_completion_tokens / 2)
    reading, products, rest = decoder.parts(at_once)
    prompts = decoder.prefill(rollout.prompts_per_step / copies * rollout.max_prompt_tokens)
    return tokens * reading, tokens * products + prompts, tokens * rest


def _head_bytes(inputs: PlanInputs) -> int:
    """Bytes read and written for a number of the output head at each token. vLLM on a CPU casts it each time."""
    if not inputs.wide_head or (inputs.resources.gpu and not _in_process(inputs)):
        return inputs.dtype_bytes
    return FLOAT32 if _in_process(inputs) else inputs.dtype_bytes + 2 * FLOAT32


def running(inputs: PlanInputs, devices: list[Device], length: float | None = None) -> int:
    """The most completions that a server generates at a time. length: mean tokens with prompts; None: full length."""
    if _in_process(inputs) and hasattr(inputs.engine, "max_rows"):
        return sampled_rows(inputs)
    limit = inputs.engine.max_num_seqs or _default_max_num_seqs(inputs.resources)
    caches = [item for device in devices for item in device.items if item.name == "vLLM: KV cache"]
    room = caches[0].generation * inputs.resources.tensor_parallel / sequence_bytes(inputs) if caches else limit
    room *= inputs.run.rollout.longest_row / length if length else 1
    return int(min(limit, max(1, room)))


def _default_max_num_seqs(resources: Resources) -> int:
    """vLLM 0.32's default of max_num_seqs for a server (its `engine/arg_utils.py`)."""
    if not resources.gpu:
        return 128
    return 1024 if resources.memory >= LARGE else 256


def _in_process(inputs: PlanInputs) -> bool:
    """Whether the trainer's own weights generate, without a sync."""
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers

    return isinstance(inputs.engine, Transformers | Fake)
