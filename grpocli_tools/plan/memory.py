"""Memory of every kind of device in a run, in bytes: during the update and during generation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.kl import has_teacher
from grpocli.models.quantization import NF4_BYTES
from grpocli.training.optim import Optimizer
from grpocli_tools.plan.resources import GIB, shares_weights

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.plan.model_size import ModelSize
    from grpocli_tools.plan.resources import Resources
    from grpocli_tools.plan.trace import MicroBatchShape, TracedMemory

FLOAT32 = 4
LIBRARIES = {"cpu": 0.6 * GIB, "cuda": 1.5 * GIB}
"""Bytes of a process without a model. CPU: measured by bench/memory.py; GPU: CUDA's context, cuBLAS and NCCL."""
VLLM = {"cpu": 1.5 * GIB, "cuda": 4 * GIB}
"""Bytes of a vLLM server beside weights and cache: libraries, activations of a batch, captured graphs."""
SAMPLED = 30
"""Bytes per logit during sampling: float32 and float64 copies in `grpocli.rollout.sampler`."""
COMPUTED = "in the dtype that the model computes in"


@dataclass(frozen=True, slots=True)
class Item:
    """A row of the table: the bytes of one kind of tensor on one device."""

    name: str
    update: float
    """Bytes during the update."""
    generation: float
    """Bytes during generation."""
    note: str = ""

    def times(self, count: int) -> Item:
        note = f"{count} processes; {self.note}".removesuffix("; ") if count > 1 else self.note
        return Item(self.name, self.update * count, self.generation * count, note)


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device with its tensors."""

    name: str
    count: int
    """Devices of this kind."""
    memory: float
    """Bytes that the run may use on each."""
    items: tuple[Item, ...]

    @property
    def peak(self) -> float:
        """The larger of the bytes during the update and during generation."""
        return max(sum(item.update for item in self.items), sum(item.generation for item in self.items))

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory * (1 + 1e-9)  # vLLM fills its share exactly


@dataclass(frozen=True)
class PlanInputs:
    """What the formulas of memory and time need."""

    run: Run
    engine: Any
    """The run's engine, with engine=auto resolved."""
    size: ModelSize
    resources: Resources
    dtype: str
    """Of the computation."""
    rows: MicroBatchShape
    """The largest micro-batch, with completions of full length."""
    micro_batches: int
    """Of an update and process."""
    traced: TracedMemory
    teachers: tuple[ModelSize, ...]
    """The models of `algorithm.kl.model`."""
    compiled: bool
    """Whether decoder layers are compiled."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the dtype of the computation."""
        return FLOAT32 if self.dtype == "float32" else 2

    @property
    def shards(self) -> int:
        """Processes that the weights are sharded over."""
        return self.resources.trainers if shares_weights(self.run) else 1

    @property
    def optimizer_shards(self) -> int:
        return 1 if self.run.hardware.parallel == "ddp" else self.resources.trainers

    @property
    def wide_head(self) -> bool:
        """Whether the output head multiplies in float32 and the rest in another dtype (`model.head_dtype`)."""
        return self.dtype_bytes < FLOAT32 and getattr(self.run.model, "head_dtype", None) == "float32"


def devices(inputs: PlanInputs) -> list[Device]:
    """The kinds of devices of a run: trainers, then servers. On a CPU: whole machines."""
    resources, trainer = inputs.resources, trainer_items(inputs)
    if not resources.gpu:
        return _cpus(inputs, trainer)
    training = Device("training GPU", resources.trainers, resources.memory, tuple(trainer))
    if not resources.servers:
        return [training]
    part = inputs.engine.memory_share(resources.shared)
    share = part * resources.memory
    serving = Device("vLLM GPU", resources.servers * resources.tensor_parallel, share, _server_items(inputs))
    if resources.shared:
        trainer.append(Item("vLLM", share, share, f"{part:g} of the same GPU (engine.gpu_memory_utilization)"))
        training = Device(training.name, training.count, training.memory, tuple(trainer))
    return [training, serving]


def _cpus(inputs: PlanInputs, trainer: list[Item]) -> list[Device]:
    """One machine for everything, or training machines and, with servers, vLLM machines."""
    resources = inputs.resources
    items = tuple(item.times(resources.trainers // resources.train_nodes) for item in trainer)
    servers = resources.servers // max(1, resources.rollout_nodes)
    served = tuple(item.times(servers) for item in _server_items(inputs)) if servers else ()
    if resources.train_nodes + resources.rollout_nodes == 1:
        return [Device("this machine", 1, resources.memory, (*items, *served))]
    kinds = [("training", resources.train_nodes, items), ("vLLM", resources.rollout_nodes, served)]
    return [Device(f"each {name} machine", count, resources.memory, own) for name, count, own in kinds if count]


def trainer_items(inputs: PlanInputs) -> list[Item]:
    own = LIBRARIES[inputs.resources.kind]
    return [
        Item("libraries", own, own, "assumed" if inputs.resources.gpu else "measured"),
        *_state(inputs),
        *_update(inputs),
        *_generation(inputs),
    ]


def _state(inputs: PlanInputs) -> list[Item]:
    """Tensors that outlive a micro-batch."""
    size, run = inputs.size, inputs.run
    sharded, split = _sharded(inputs.shards), _sharded(inputs.optimizer_shards)
    weights, dtypes = FLOAT32 * size.parameters / inputs.shards, f"float32{sharded}"
    if size.quantized:
        rest = inputs.dtype_bytes * (size.parameters - size.quantized - size.adapter)
        weights = NF4_BYTES * size.quantized + rest + FLOAT32 * size.adapter
        dtypes = f"4 bits and a scale for 64 weights; embedding, head and norms {COMPUTED}; LoRA float32"
    moments, kinds = optimizer_bytes(inputs)
    held = [
        (f"{teacher.parameters:,} parameters, float32{sharded}", "teacher", teacher.parameters)
        for teacher in inputs.teachers
    ]
    copied = not run.model.lora.rank or run.algorithm.kl.sync_every
    if run.algorithm.needs_reference and copied and not has_teacher(run.algorithm.kl):
        held.append((f"float32{sharded}", "reference model", size.parameters - size.adapter))
    frozen = [(name, FLOAT32 * count / inputs.shards, note) for note, name, count in held]
    return [
        Item("weights", weights, weights, dtypes),
        _gradients(inputs, FLOAT32 * size.trained / inputs.optimizer_shards),
        Item("optimizer", moments, moments, f"{kinds}{split}"),
        *(Item(name, count, count, note) for name, count, note in frozen),
    ]


def optimizer_bytes(inputs: PlanInputs) -> tuple[float, str]:
    """The bytes of the optimizer's state in a process, and what it is. Of a user's optimizer: as much as AdamW's."""
    optim, size = inputs.run.optim, inputs.size
    if not isinstance(optim, Optimizer):
        return 2 * FLOAT32 * size.trained / inputs.optimizer_shards, "assumed: two moments, float32"
    tensors = chain.from_iterable(optim.state_of(*parameter).values() for parameter in size.trained_shapes)
    total = sum(tensor.size * math.prod(tensor.shape) for tensor in tensors if tensor.shape)
    return total / inputs.optimizer_shards, f"the state of {type(optim).__name__}"


def _gradients(inputs: PlanInputs, whole: float) -> Item:
    """With one micro-batch, gradients appear as activations are freed, so only the larger of the two counts."""
    if inputs.run.hardware.parallel == "ddp" and inputs.resources.trainers > 1:
        return Item("gradients", whole, whole, "float32, in DistributedDataParallel's buckets")
    if inputs.micro_batches > 1:
        return Item("gradients", whole, 0, f"float32{_sharded(inputs.optimizer_shards)}")
    beyond = max(0.0, whole - inputs.traced.total)
    return Item("gradients", beyond, 0, "float32, beyond the activations that they take the resources of")


def _update(inputs: PlanInputs) -> list[Item]:
    """Tensors that live until the backward pass of a micro-batch ends."""
    size, traced = inputs.size, inputs.traced
    casts = [Item("cast weights", traced.casts, 0, COMPUTED)]
    if inputs.shards > 1:
        gathered = inputs.dtype_bytes * (size.outside + 2 * size.layer)
        casts = [
            Item("gathered weights", gathered, 0, "embedding, head and two layers at a time"),
            Item("gathered gradients", _gathered_gradients(inputs), 0, "whole, until each process has its shard"),
        ]
    return [
        *casts,
        Item("activations", traced.activations, 0, "kept by decoder layers for the backward pass"),
        Item("head", traced.logits, 0, "kept outside of decoder layers; the backward pass recomputes logits"),
        Item("backward", traced.peak, 0, "further tensors at the peak of the backward pass"),
    ]


def _gathered_gradients(inputs: PlanInputs) -> float:
    """Bytes at the larger of two moments: during a layer's backward pass, and after the last one."""
    if inputs.size.adapter:
        return FLOAT32 * inputs.size.adapter / inputs.size.layers
    of_a_layer = (inputs.dtype_bytes + FLOAT32) * inputs.size.layer
    at_the_end = FLOAT32 * inputs.size.outside - inputs.traced.activations
    return inputs.dtype_bytes * inputs.size.outside + max(of_a_layer, at_the_end)


def _generation(inputs: PlanInputs) -> list[Item]:
    """Tensors of generation in a trainer process: the sampler's, vLLM's, or those of the sync to a server."""
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers
    from grpocli.rollout.vllm.engine_parts import VllmColocate

    if isinstance(inputs.engine, Fake):
        return []  # it scores one completion at a time
    if isinstance(inputs.engine, Transformers):
        return _sampling(inputs)
    if isinstance(inputs.engine, VllmColocate):
        return _colocated(inputs)
    largest = FLOAT32 * max(inputs.size.embedding, inputs.size.head)  # the largest tensor, whole and cast
    buckets = 0 if inputs.size.adapter else 2 * inputs.run.sync.bucket_mb * 2**20 + largest
    return [Item("weight sync", 0, buckets, "two buckets of sync.bucket_mb, and the largest tensor")]


def sampled_rows(inputs: PlanInputs) -> int:
    """Completions that engine=transformers samples at a time in one process."""
    from grpocli.training.schedule import MAX_REFILL

    run, group = inputs.run, inputs.run.rollout.group_size
    prompts = run.rollout.prompts_per_step * (MAX_REFILL if run.algorithm.keep.max_rounds > 1 else 1)
    problems = run.eval.n_problems(cpu=False) * len(run.tasks)
    rows = max(math.ceil(prompts / inputs.resources.trainers) * group, problems * run.eval.samples)
    return int(min(rows, max(group, inputs.engine.max_rows // group * group)))


def _sampling(inputs: PlanInputs) -> list[Item]:
    from grpocli.environments.environment import environment_of

    size, run = inputs.size, inputs.run
    rows, length = sampled_rows(inputs), run.rollout.longest_row
    # on a CPU keys and values are float32; on a GPU, under autocast, only a prompt's keys are
    number = FLOAT32 if inputs.dtype_bytes == FLOAT32 or not inputs.resources.gpu else 3
    cache = number * size.cache_per_token * rows * length * (1 + 1 / size.layers)
    rows_of = f"{rows:,} completions of {length:,} tokens"
    if any(one.turns > 1 for one in map(environment_of, run.tasks.values()) if one):
        cache, rows_of = 2 * cache, f"{rows_of}, twice: as many stay between turns"
    whole = inputs.dtype_bytes * size.multiplied + (FLOAT32 if inputs.wide_head else inputs.dtype_bytes) * size.head
    casts = whole if inputs.dtype_bytes < FLOAT32 or inputs.shards > 1 else 0
    which = "all weights"
    if size.quantized:
        casts, which = inputs.dtype_bytes * (size.adapter + size.widest), "LoRA's, and one layer at a time"
    dtypes = COMPUTED + ", the output head in float32" * inputs.wide_head
    return [
        Item("weights to sample with", 0, casts, f"{which}, {dtypes}"),
        Item("KV cache", 0, cache, rows_of),
        Item("sampling", 0, SAMPLED * rows * size.vocabulary, "logits, and float32 and float64 copies"),
    ]


def _colocated(inputs: PlanInputs) -> list[Item]:
    if inputs.resources.gpu:
        share = inputs.engine.gpu_memory_utilization * inputs.resources.memory
        stays = share if inputs.engine.option("enable_sleep_mode") is False else 0
        return [Item("vLLM", stays, share, "engine.gpu_memory_utilization of the GPU")]
    cache, own = inputs.engine.cpu_kv_cache_gb * GIB, VLLM["cpu"] / 2
    weights = inputs.dtype_bytes * (inputs.size.parameters - inputs.size.adapter)
    return [
        Item("vLLM", own, own, "libraries and workspace"),
        Item("vLLM's weights", weights, weights, "a copy beside the trainer's"),
        *_cast_heads(inputs),
        Item("KV cache", cache, cache, "engine.cpu_kv_cache_gb"),
    ]


def _server_items(inputs: PlanInputs) -> tuple[Item, ...]:
    """Rows of one GPU of a server, or of a server on a CPU."""
    own, weights, cache = _server_bytes(inputs)
    tp = inputs.resources.tensor_parallel
    fit = int(cache * tp / sequence_bytes(inputs))
    note = f"room for {fit:,} completion{'' if fit == 1 else 's'} of full length at a time"
    split = f", over {tp} GPUs" if tp > 1 else ""
    return (
        Item("vLLM: libraries and workspace", own, own, "assumed"),
        Item("vLLM: weights", weights, weights, f"{COMPUTED}{split}"),
        *_cast_heads(inputs),
        Item("vLLM: KV cache", cache, cache, note),
    )


def _server_bytes(inputs: PlanInputs) -> tuple[float, float, float]:
    """Bytes of workspace, weights and KV cache on one GPU of a server, or of a server on a CPU."""
    size, resources = inputs.size, inputs.resources
    tp, own = resources.tensor_parallel, VLLM[resources.kind]
    weights = inputs.dtype_bytes * (size.parameters - size.adapter) / tp
    if not resources.gpu:
        return own, weights, inputs.engine.cpu_kv_cache_gb * GIB
    share = inputs.engine.memory_share(resources.shared) * resources.memory
    return own, weights, max(share - weights - own, sequence_bytes(inputs) / tp)


def server_sequences(inputs: PlanInputs) -> float:
    """The completions of full length that the KV cache of a server holds."""
    return _server_bytes(inputs)[2] * inputs.resources.tensor_parallel / sequence_bytes(inputs)


def _cast_heads(inputs: PlanInputs) -> list[Item]:
    """vLLM's output head in float32; on a GPU its product casts no weights."""
    if inputs.resources.gpu or not inputs.wide_head:
        return []
    return [Item("vLLM: output head", 0, FLOAT32 * inputs.size.head, "a cast to float32 for every token")]


def sequence_bytes(inputs: PlanInputs) -> float:
    """Bytes of the KV cache for one prompt and completion of full length."""
    return inputs.dtype_bytes * inputs.size.cache_per_token * inputs.run.rollout.longest_row


def _sharded(shards: int) -> str:
    return f", sharded over {shards} processes" if shards > 1 else ""
