"""Seconds of training and decoding on a device: the work at full speed, times costs that were fitted to published runs.

A cost of 2 means that half of the device's speed is reached. `bench/plans.py --fit` fits the costs of a GPU to the rows
of `bench/published.json` that its rule chooses. docs/plan.md has the formulas; docs/evidence/plan.md says what each
cost rests on, and how far the other rows are off.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grpocli_tools.plan.model_size import ModelSize
    from grpocli_tools.plan.resources import Resources


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of one device in a step of training, each part in seconds at the device's full speed.

    linear: products with weights, of the output head and of a mixture's experts too. attention, attention_3: products
    of queries, keys and values, by FlashAttention 3 and by any other kernel. activations: reading and writing inputs
    and outputs of products; its cost also holds what a layer reads and writes between products. adapters: the same for
    what LoRA adds to. weights: reading weights, reading and writing optimizer state. logits: reading and writing
    logits. network: gathering weights, reducing gradients, exchanging heads. layers: not in seconds: how many layers
    start, counting each pass of each micro-batch.
    """

    linear: float = 0.0
    attention: float = 0.0
    attention_3: float = 0.0
    activations: float = 0.0
    adapters: float = 0.0
    weights: float = 0.0
    logits: float = 0.0
    network: float = 0.0
    layers: float = 0.0

    def values(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)

    def seconds(self, costs: Demand) -> float:
        """The parts follow each other: each takes its time at full speed, times its cost."""
        return sum(amount * cost for amount, cost in zip(self.values(), costs.values(), strict=True))

    def part(self, *names: str) -> Demand:
        """The same work without other parts."""
        return Demand(**{name: getattr(self, name) for name in names})


COMPUTE = tuple(field.name for field in dataclasses.fields(Demand) if field.name != "network")

COSTS = {
    "cpu": Demand(linear=2.5, attention=2.5, attention_3=2.5, network=1.0),
    "cuda": Demand(
        linear=1.25,
        attention=2.696,
        attention_3=1.488,
        activations=13.53,
        adapters=12.36,
        weights=1.25,
        logits=1.25,
        network=1.25,
        layers=1e-4,
    ),
}
"""For "cuda": linear to adapters as `bench/plans.py --fit` prints them; the rest is assumed, since the published runs
do not tell it apart. weights, logits, network: 80 % of a memory's or a link's speed. layers: 20 kernels of 5 µs. For
"cpu" products reach 40 % of a guessed peak."""


HOST = {"cpu": 0.0, "cuda": 12.5e-6}
"""Seconds of the host for an operation of torch, while the GPU computes: an update of 73,413 took 0.92 s beside an
H100, which computed for 0.58 s."""
OF_A_PASS, OF_A_LAYER, OF_A_COMPILED_LAYER = 270, 300, 160
"""Operations of a micro-batch's pass, and of a layer in it, as `make bench-operations` counts them; a compiled layer
took the host as long as 160."""


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Costs of decoding one token of each running sequence.

    reading: of weights and cache. compute: of products. step: seconds however small the model and few the sequences.
    split_layer: seconds of each layer that several devices share. sequence: seconds of each running sequence, for
    scheduling and sampling.
    """

    reading: float
    compute: float
    step: float = 0.0
    split_layer: float = 0.0
    sequence: float = 0.0


DECODE_COSTS = {
    "cpu": DecodeCosts(reading=1 / 0.6, compute=2.5),
    "cuda": DecodeCosts(reading=1.25, compute=2.0, step=1e-3, split_layer=7.5e-5, sequence=7.5e-6),
}
"""For "cuda" as `bench/plans.py --fit` prints them, from published rates of decoding; compute is assumed."""

HEAD_FORWARD, HEAD_BACKWARD = 4, 6
"""Bytes read and written for a logit in a forward and a backward pass of the head, beside factors of products."""
WIDE_HEAD_FORWARD, WIDE_HEAD_BACKWARD = 8, 34
"""The same with model.head_dtype=float32 on a GPU: products write float32; gradients are multiplied in two parts."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A step of training: how much is computed, and how.

    rows: completions. prompts: prompts that are computed. prompt, completion: mean tokens. forward, backward: passes
    over each row; a backward pass costs twice a forward pass, or as much with frozen weights. scoring: how many of the
    forward passes save nothing for a backward pass. micro_batches: of one device, per pass. updates: of the optimizer.
    checkpointing: whether the backward pass repeats the forward pass. frozen: whether only adapters are trained.
    shards: devices that share the weights. shared_by: devices that share each micro-batch. dtype_bytes: of a number
    that is multiplied. wide_head: whether the output head multiplies in float32. flash_3: FlashAttention 3. compiled:
    whether decoder layers are.
    """

    rows: float
    prompts: float
    prompt: float
    completion: float
    scoring: float
    epochs: float
    micro_batches: float
    updates: int
    checkpointing: bool
    frozen: bool
    shards: int
    dtype_bytes: int
    shared_by: int = 1
    wide_head: bool = False
    flash_3: bool = False
    compiled: bool = False

    @property
    def tokens(self) -> float:
        return self.prompts * self.prompt + self.rows * self.completion

    @property
    def attended(self) -> float:
        """Pairs of tokens: each token of a row and those before it."""
        own, shared = self.prompt + self.completion, self.prompts / self.rows if self.rows else 0.0
        return self.rows * (own**2 - (1 - shared) * self.prompt**2) / 2

    @property
    def forward(self) -> float:
        """Forward passes, those that a backward pass repeats included."""
        return self.scoring + self.epochs * (2 if self.checkpointing else 1)

    @property
    def logit_bytes(self) -> float:
        """Bytes read and written for each logit of a completion token."""
        forward, backward = (WIDE_HEAD_FORWARD, WIDE_HEAD_BACKWARD) if self.wide_head else (HEAD_FORWARD, HEAD_BACKWARD)
        return forward * (self.scoring + self.epochs) + backward * self.epochs


FLOAT32 = 4
OPTIMIZER_BYTES = 28
"""Bytes read and written for a trained parameter by AdamW in float32: four numbers in, three out."""
BACKWARD_ATTENTION = 2.5
"""Products of a backward pass of attention, in units of the forward pass: five instead of two."""


def training_demand(size: ModelSize, step: TrainingStep, devices: int, speed: Resources, slower: float = 1.0) -> Demand:
    """The work of each of `devices` in a step. slower: how much longer products take than in bfloat16."""
    forward, backward = step.forward, step.epochs * (1 if step.frozen else 2)
    passes = forward + backward
    peak, bandwidth = speed.tflops * 1e12 / slower, speed.bandwidth * 1e12
    tokens, scored = step.tokens / devices, step.rows * step.completion / devices
    head = 2 * size.head * scored * (step.scoring + 2 * step.epochs + backward)  # the backward pass repeats the forward
    pairs = 4 * size.layers * size.attention_width * step.attended / devices
    attention = pairs * (forward + step.epochs * BACKWARD_ATTENTION) / peak
    weights = step.dtype_bytes * size.multiplied * step.micro_batches * passes
    states = OPTIMIZER_BYTES * step.updates * size.trained / step.shards
    numbers = step.dtype_bytes * tokens * passes / bandwidth
    return Demand(
        linear=(2 * size.multiplied_by_a_token * tokens * passes + head) / peak,
        attention=0.0 if step.flash_3 else attention,
        attention_3=attention if step.flash_3 else 0.0,
        activations=numbers * size.moved,
        adapters=numbers * size.adapted,
        weights=(weights + states) / bandwidth,
        logits=size.vocabulary * scored * step.logit_bytes / bandwidth,
        network=(network_bytes(size, step, devices) + exchanged_bytes(size, step, devices)) / speed.link,
        layers=size.layers * step.micro_batches * (forward + step.epochs),
    )


def operations(size: ModelSize, step: TrainingStep) -> float:
    """The operations of torch in a step of training, however large its tensors are."""
    layer = OF_A_COMPILED_LAYER if step.compiled else OF_A_LAYER
    return step.micro_batches * (step.forward + step.epochs) * (OF_A_PASS + layer * size.layers)


def network_bytes(size: ModelSize, step: TrainingStep, devices: int) -> float:
    """Bytes that a device receives: gathered weights, and gradients in float32."""
    others = (devices - 1) / devices
    if step.shards == 1:
        return 2 * FLOAT32 * size.trained * step.updates * others
    gathered = step.dtype_bytes * size.parameters * step.micro_batches * (step.scoring + 2 * step.epochs)
    reduced = FLOAT32 * size.trained * step.micro_batches * step.epochs
    return (gathered + reduced) * others


def exchanged_bytes(size: ModelSize, step: TrainingStep, devices: int) -> float:
    """Bytes that a device receives around attention from those it shares micro-batches with.

    Queries, keys and values of its tokens go out by heads and outputs come back, in every pass; heads of keys and
    values are repeated until they can be dealt out evenly.
    """
    sharing = step.shared_by
    if sharing == 1:
        return 0.0
    keys = size.kv_heads * sharing // math.gcd(size.kv_heads, sharing)
    numbers = 2 * (size.heads + keys) * size.head_size * size.layers
    passes = step.forward + step.epochs
    return step.dtype_bytes * numbers * step.tokens / devices * passes * (sharing - 1) / sharing


@dataclass(frozen=True, slots=True)
class Decoding:
    """Seconds for one token of each of n sequences on a server, n up to `most`, at a mean context.

    tensor_parallel: devices of the server. head_bytes: read for a number of the output head. context: mean tokens
    before the one that is decoded.
    """

    size: ModelSize
    speed: Resources
    costs: DecodeCosts
    tensor_parallel: int
    dtype_bytes: int
    head_bytes: int
    context: float
    slower: float = 1.0

    def parts(self, running: float) -> tuple[float, float, float]:
        """Seconds of reading, of products, and of the rest."""
        size, devices = self.size, self.tensor_parallel
        peak = self.speed.tflops * 1e12 * devices / self.slower
        bandwidth = self.speed.bandwidth * 1e12 * devices
        reads = self.dtype_bytes * (self.weights_read(running) + running * self.context * size.cache_per_token)
        reads += self.head_bytes * size.head
        products = 2 * running * (size.multiplied_by_a_token + size.head)
        products += 4 * running * self.context * size.layers * size.attention_width
        rest = self.costs.step + running * self.costs.sequence
        rest += size.layers * self.costs.split_layer if devices > 1 else 0.0
        return self.costs.reading * reads / bandwidth, self.costs.compute * products / peak, rest

    def seconds(self, running: float) -> float:
        """Reading and products overlap, so the longer one counts."""
        reading, products, rest = self.parts(running)
        return max(reading, products) + rest

    def weights_read(self, running: float) -> float:
        """Weights below the head that a sequence needs: of a mixture, the experts that some token goes to."""
        size = self.size
        dense = size.multiplied - size.experts
        if not size.experts:
            return dense
        idle = size.idle / size.experts
        return float(dense + size.experts * (1 - idle**running))

    def prefill(self, tokens: float) -> float:
        """Seconds for the tokens of prompts."""
        peak = self.speed.tflops * 1e12 * self.tensor_parallel / self.slower
        return self.costs.compute * 2 * tokens * self.size.multiplied_by_a_token / peak

    def table(self, most: int) -> Sequence[float]:
        """Seconds by the number of running sequences, from 0."""
        return [0.0, *(self.seconds(n) for n in range(1, most + 1))]
