"""Bytes on every kind of device of a run: while it updates, and while completions are generated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpocli.plan.placement import GIB, shares_weights

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.plan.placement import Placement
    from grpocli.plan.shape import Shape
    from grpocli.plan.trace import Traced

FLOAT32 = 4
LIBRARIES = {"cpu": 0.6 * GIB, "cuda": 1.5 * GIB}
"""Of a process before any model: on a CPU as measured by bench/memory.py, on a GPU CUDA's context, cuBLAS and NCCL."""
VLLM = {"cpu": 1.5 * GIB, "cuda": 4 * GIB}
"""What a vLLM server has beside weights and cache: libraries, activations of a batch, captured graphs."""
SAMPLED = 30
"""Bytes for each logit of a row that is sampled from: float32 and float64 copies in `grpocli.rollout.sampler`."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one thing on one device while it updates and while completions are generated."""

    name: str
    update: float
    generation: float
    note: str = ""

    def times(self, count: int) -> Item:
        note = f"{count} processes; {self.note}".removesuffix("; ") if count > 1 else self.note
        return Item(self.name, self.update * count, self.generation * count, note)


@dataclass(frozen=True, slots=True)
class Device:
    """name: for people. count: how many there are of the kind. memory: bytes of each, or those that may be taken."""

    name: str
    count: int
    memory: float
    items: tuple[Item, ...]

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return max(sum(item.update for item in self.items), sum(item.generation for item in self.items))

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory * (1 + 1e-9)  # vLLM takes its share to the last byte


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What memory is reckoned from. dtype_bytes: of a number in the dtype that the model computes in."""

    run: Run
    engine: Any
    shape: Shape
    place: Placement
    traced: Traced
    packed: bool
    micro_batches: int
    dtype_bytes: int

    @property
    def shards(self) -> int:
        """Over how many processes weights are spread."""
        return self.place.trainers if shares_weights(self.run) else 1

    @property
    def optimizer_shards(self) -> int:
        return 1 if self.run.hardware.parallel == "ddp" else self.place.trainers


def devices(needs: PlanInputs) -> list[Device]:
    """Every kind of device of the run: trainers, then servers; on a CPU the whole machine."""
    place, trainer = needs.place, trainer_items(needs)
    if not place.gpu:
        return _cpus(needs, trainer)
    if not place.servers:
        return [Device("training GPU", place.trainers, place.memory, tuple(trainer))]
    share = needs.engine.gpu_memory_utilization * place.memory
    serving = Device("vLLM on its GPU", place.servers * place.tensor_parallel, share, _server_items(needs, share))
    if place.shared:
        trainer.append(Item("vLLM", share, share, "engine.gpu_memory_utilization of the same GPU"))
    return [Device("training GPU", place.trainers, place.memory, tuple(trainer)), serving]


def _cpus(needs: PlanInputs, trainer: list[Item]) -> list[Device]:
    """One machine that does everything, or machines that train and, where there are servers, machines that serve."""
    place = needs.place
    items = tuple(item.times(place.trainers // place.train_nodes) for item in trainer)
    servers = place.servers // max(1, place.rollout_nodes)
    served = tuple(item.times(servers) for item in _server_items(needs, 0)) if servers else ()
    if place.train_nodes + place.rollout_nodes == 1:
        return [Device("this machine", 1, place.memory, (*items, *served))]
    training = Device("each training machine", place.train_nodes, place.memory, items)
    serving = [Device("each vLLM machine", place.rollout_nodes, place.memory, served)] if place.rollout_nodes else []
    return [training, *serving]


def trainer_items(needs: PlanInputs) -> list[Item]:
    """Of one trainer process."""
    own = LIBRARIES[needs.place.kind]
    return [
        Item("libraries", own, own, "assumed" if needs.place.gpu else "measured"),
        *_state(needs),
        *_update(needs),
        *_generation(needs),
    ]


def _state(needs: PlanInputs) -> list[Item]:
    """What outlives a micro-batch."""
    shape, run = needs.shape, needs.run
    weights = FLOAT32 * shape.parameters / needs.shards
    gradients = FLOAT32 * shape.trained / needs.optimizer_shards
    moments = 2 * FLOAT32 * shape.trained / needs.optimizer_shards
    items = [
        Item("weights", weights, weights, f"float32{_shared(needs.shards)}"),
        _gradients(needs, gradients),
        Item("optimizer", moments, moments, f"AdamW's two moments, float32{_shared(needs.optimizer_shards)}"),
    ]
    if run.algorithm.needs_reference and (not run.model.lora.rank or run.algorithm.kl.sync_every):
        reference = FLOAT32 * (shape.parameters - shape.adapter) / needs.shards
        items.append(Item("reference model", reference, reference, f"float32{_shared(needs.shards)}"))
    return items


def _gradients(needs: PlanInputs, whole: float) -> Item:
    """Of one micro-batch they come as its activations go, so that only the larger of the two counts."""
    if needs.run.hardware.parallel == "ddp" and needs.place.trainers > 1:
        return Item("gradients", whole, whole, "float32, in DistributedDataParallel's buckets")
    if needs.micro_batches > 1:
        return Item("gradients", whole, 0, f"float32{_shared(needs.optimizer_shards)}")
    beyond = max(0.0, whole - needs.traced.total)
    return Item("gradients", beyond, 0, "float32, beyond the activations that they take the place of")


def _update(needs: PlanInputs) -> list[Item]:
    """What a micro-batch needs until its backward pass has ended."""
    shape, traced = needs.shape, needs.traced
    if needs.shards > 1:
        gathered = needs.dtype_bytes * (shape.outside + 2 * shape.layer)
        casts = [
            Item("gathered weights", gathered, 0, "embedding, head and two layers at a time"),
            Item("gathered gradients", _gathered_gradients(needs), 0, "until each process has its part"),
        ]
    else:
        casts = [Item("cast weights", traced.casts, 0, "in the dtype that the model computes in")]
    return [
        *casts,
        Item("activations", traced.activations, 0, "kept by decoder layers for the backward pass"),
        Item("head", traced.logits, 0, "kept outside of decoder layers; logits are made again in the backward pass"),
        Item("backward", traced.more, 0, "what the backward pass has beside these at its worst"),
    ]


def _gathered_gradients(needs: PlanInputs) -> float:
    """A layer's in both dtypes on top of the head's; at the end, when activations are gone, those outside of layers."""
    if needs.shape.adapter:
        return FLOAT32 * needs.shape.adapter / needs.shape.layers
    of_a_layer = (needs.dtype_bytes + FLOAT32) * needs.shape.layer
    at_the_end = FLOAT32 * needs.shape.outside - needs.traced.activations
    return needs.dtype_bytes * needs.shape.outside + max(of_a_layer, at_the_end)


def _generation(needs: PlanInputs) -> list[Item]:
    """What a trainer process has of generation: all of it, a vLLM of its own, or the sync to a server."""
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers
    from grpocli.rollout.vllm.colocate_options import VllmColocate

    if isinstance(needs.engine, Fake):
        return []  # it scores one completion at a time
    if isinstance(needs.engine, Transformers):
        return _sampling(needs)
    if isinstance(needs.engine, VllmColocate):
        return _colocated(needs)
    largest = FLOAT32 * max(needs.shape.embedding, needs.shape.head)  # the largest tensor, whole and cast
    buckets = 2 * needs.run.sync.bucket_mb * 2**20 + largest
    return [Item("weight sync", 0, 0 if needs.shape.adapter else buckets, "two of sync.bucket_mb, and a tensor")]


def sampled_rows(needs: PlanInputs) -> int:
    """Completions that engine=transformers samples side by side in a process."""
    from grpocli.tasks.mixture import tasks_of
    from grpocli.training.collector import MAX_REFILL

    run, group = needs.run, needs.run.rollout.group_size
    prompts = run.rollout.prompts_per_step * (MAX_REFILL if run.algorithm.keep.max_rounds > 1 else 1)
    problems = run.eval.n_problems(cpu=False) * len(tasks_of(run.task))
    rows = max(math.ceil(prompts / needs.place.trainers) * group, problems * run.eval.samples)
    return int(min(rows, max(group, needs.engine.max_rows // group * group)))


def _sampling(needs: PlanInputs) -> list[Item]:
    shape, run = needs.shape, needs.run
    rows = sampled_rows(needs)
    length = run.rollout.longest_row
    # on a CPU both are float32; elsewhere under autocast a prompt's keys are, its values are not
    number = FLOAT32 if needs.dtype_bytes == FLOAT32 or not needs.place.gpu else 3
    cache = number * shape.cache_per_token * rows * length * (1 + 1 / shape.layers)
    rows_of = f"{rows:,} completions of {length:,} tokens"
    if _has_turns(run):
        cache, rows_of = 2 * cache, f"{rows_of}, and what is kept of as many between turns"
    whole = needs.dtype_bytes * (shape.multiplied + shape.head)
    casts = whole if needs.dtype_bytes < FLOAT32 or needs.shards > 1 else 0
    return [
        Item("weights to sample with", 0, casts, "whole, in the dtype that the model computes in"),
        Item("KV cache", 0, cache, rows_of),
        Item("sampling", 0, SAMPLED * rows * _vocabulary(needs), "logits, and float32 and float64 copies"),
    ]


def _has_turns(run: Run) -> bool:
    """Whether a task has episodes that may go on after a turn."""
    from grpocli.environments.environment import play_of
    from grpocli.tasks.mixture import tasks_of

    return any(play.turns > 1 for task in tasks_of(run.task).values() if (play := play_of(task)))


def _colocated(needs: PlanInputs) -> list[Item]:
    if needs.place.gpu:
        share = needs.engine.gpu_memory_utilization * needs.place.memory
        stays = share if needs.engine.sleep is False else 0
        return [Item("vLLM", stays, share, "engine.gpu_memory_utilization of the GPU")]
    cache = needs.engine.cpu_kv_cache_gb * GIB
    weights = needs.dtype_bytes * (needs.shape.parameters - needs.shape.adapter)
    return [
        Item("vLLM", VLLM["cpu"] / 2, VLLM["cpu"] / 2, "libraries and workspace"),
        Item("vLLM's weights", weights, weights, "a copy of its own"),
        Item("KV cache", cache, cache, "engine.cpu_kv_cache_gb"),
    ]


def _server_items(needs: PlanInputs, share: float) -> tuple[Item, ...]:
    """Of one GPU of a server (share: bytes that it may take), or of a server on a CPU."""
    shape, tp = needs.shape, needs.place.tensor_parallel
    weights = needs.dtype_bytes * (shape.parameters - shape.adapter) / tp
    own = VLLM[needs.place.kind]
    least = sequence_bytes(needs) / tp
    cache = max(share - weights - own, least) if needs.place.gpu else needs.engine.cpu_kv_cache_gb * GIB
    fit = int(cache / least)
    note = f"room for {fit:,} completion{'' if fit == 1 else 's'} of full length at a time"
    split = f", over {tp} GPUs" if tp > 1 else ""
    return (
        Item("vLLM: libraries and workspace", own, own, "assumed"),
        Item("vLLM: weights", weights, weights, f"in the dtype that the model computes in{split}"),
        Item("vLLM: KV cache", cache, cache, note),
    )


def sequence_bytes(needs: PlanInputs) -> float:
    """Of the KV cache of one prompt and completion of full length."""
    rollout = needs.run.rollout
    length = rollout.longest_row
    return needs.dtype_bytes * needs.shape.cache_per_token * length


def _vocabulary(needs: PlanInputs) -> int:
    return int(needs.shape.config.get_text_config().vocab_size)


def _shared(shards: int) -> str:
    return f", over {shards} processes" if shards > 1 else ""
