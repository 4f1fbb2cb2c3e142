"""Seconds of training and decoding on a device: the work at full speed, times costs that were fitted to published runs.

A cost of 2 means that half of the device's speed is reached. `bench/plans.py --fit` fits the costs of a GPU to the rows
of `bench/published.json` that its rule chooses. docs/plan.md has the formulas; docs/evidence/plan.md says what each
cost rests on, and how far the other rows are off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpocli.algorithm.kl import has_teacher
from grpocli_tools.plan.memory import FLOAT32, PlanInputs, sampled_rows, server_sequences
from grpocli_tools.plan.model_size import ModelSize
from grpocli_tools.plan.resources import FLOAT32_SLOWER, GIB, SPEEDS


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of one device in a step of training, each part in seconds at the device's full speed."""

    linear: float = 0.0
    """Products with weights, of the output head and of a mixture's experts too."""
    attention: float = 0.0
    """Products of queries, keys and values, by any kernel but the next."""
    attention_3: float = 0.0
    """The same by FlashAttention 3."""
    activations: float = 0.0
    """Reading and writing inputs and outputs of products; the cost holds what a layer moves between products, too."""
    adapters: float = 0.0
    """The same for what LoRA adds to."""
    weights: float = 0.0
    """Reading weights, reading and writing optimizer state."""
    logits: float = 0.0
    """Reading and writing logits."""
    network: float = 0.0
    """Gathering weights, reducing gradients, exchanging heads."""
    layers: float = 0.0
    """Not in seconds: how many layers start, counting each pass of each micro-batch."""

    def values(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)

    def seconds(self, costs: Demand) -> float:
        """The parts follow each other: each takes its time at full speed, times its cost."""
        return sum(amount * cost for amount, cost in zip(self.values(), costs.values(), strict=True))

    def part(self, *names: str) -> Demand:
        """The same work without other parts."""
        return Demand(**{name: getattr(self, name) for name in names})


COMPUTE = tuple(field.name for field in dataclasses.fields(Demand) if field.name != "network")
COSTS = {kind: Demand(**costs) for kind, costs in SPEEDS["training"].items()}
HOST = {"cpu": 0.0, "cuda": 12.5e-6}
"""Seconds of the host for an operation of torch, while the GPU computes: an update of 73,413 took 0.92 s beside an
H100, which computed for 0.58 s."""
OF_A_PASS, OF_A_LAYER, OF_A_COMPILED_LAYER = 270, 300, 160
"""Operations of a micro-batch's pass, and of a layer in it, as `make bench-operations` counts them; a compiled layer
took the host as long as 160."""
HEAD_FORWARD, HEAD_BACKWARD = 4, 6
"""Bytes read and written for a logit in a forward and a backward pass of the head, beside factors of products."""
WIDE_HEAD_FORWARD, WIDE_HEAD_BACKWARD = 8, 34
"""The same with model.head_dtype=float32 on a GPU: products write float32; gradients are multiplied in two parts."""
OPTIMIZER_BYTES = 28
"""Bytes read and written for a trained parameter by AdamW in float32: four numbers in, three out."""
BACKWARD_ATTENTION = 2.5
"""Products of a backward pass of attention, in units of the forward pass: five instead of two."""
LINK = 25e9
"""Bytes per second from trainer to server, over a fast network; within a machine it is more."""
LARGE = 70 * GIB
"""GPU memory in bytes from which vLLM's default of max_num_seqs is larger."""


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Costs of decoding one token of each running sequence."""

    reading: float
    """Of weights and cache."""
    compute: float
    """Of products."""
    step: float = 0.0
    """Seconds however small the model and few the sequences."""
    split_layer: float = 0.0
    """Seconds of each layer that several devices share."""
    sequence: float = 0.0
    """Seconds of each running sequence, for scheduling and sampling."""


DECODE_COSTS = {kind: DecodeCosts(**costs) for kind, costs in SPEEDS["decoding"].items()}


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The update of a step, with prompts and completions of these mean lengths."""

    inputs: PlanInputs
    prompt: float
    """Mean tokens."""
    completion: float
    """Mean tokens."""
    prompts: float
    """Prompts that are computed."""
    micro_batches: float
    """Of one device, per pass over the rows."""
    scoring: float
    """Forward passes that save nothing for a backward pass."""
    shards: int
    """Devices that share the weights."""
    flash_3: bool
    """Whether FlashAttention 3 computes attention."""

    @classmethod
    def of(cls, inputs: PlanInputs, prompt: float | None = None, completion: float | None = None) -> TrainingStep:
        """The update of a plan. prompt, completion: mean tokens; None: full length."""
        run, train, rollout = inputs.run, inputs.run.train, inputs.run.rollout
        rows = rollout.prompts_per_step * rollout.group_size
        prompts = rollout.prompts_per_step if inputs.rows.packed else rows
        batches: float = inputs.micro_batches * train.minibatches
        if prompt or completion:
            tokens = prompts * (prompt or 0.0) + rows * (completion or 0.0)
            batches = max(train.minibatches, math.ceil(tokens / trainers_of(inputs) / train.micro_batch_tokens))
        return cls(
            inputs,
            prompt=prompt or rollout.max_prompt_tokens,
            completion=completion or rollout.max_completion_tokens,
            prompts=prompts,
            micro_batches=batches,
            scoring=_reference_passes(inputs)
            + (1 if run.algorithm.tokens.needs_entropy else (train.minibatches - 1) / train.minibatches),
            shards=inputs.shards,
            flash_3=run.model.attention == "flash_attention_3",
        )

    @property
    def rows(self) -> int:
        return int(self.inputs.run.rollout.prompts_per_step * self.inputs.run.rollout.group_size)

    @property
    def epochs(self) -> int:
        return int(self.inputs.run.train.epochs)

    @property
    def forward(self) -> float:
        """Forward passes over each row, those that a backward pass repeats included."""
        return self.scoring + self.epochs * (2 if self.inputs.run.train.gradient_checkpointing else 1)

    @property
    def backward(self) -> float:
        """Backward passes, in units of a forward pass: gradients of activations, and of weights unless frozen."""
        return self.epochs * (1 if self.inputs.run.model.lora.rank else 2)

    @property
    def head_passes(self) -> float:
        """Passes of the output head in units of a forward pass; a backward pass repeats its forward pass."""
        return self.scoring + 2 * self.epochs + self.backward

    def demand(self) -> Demand:
        inputs, size, resources = self.inputs, self.inputs.size, self.inputs.resources
        devices, dtype_bytes, passes = trainers_of(inputs), inputs.dtype_bytes, self.forward + self.backward
        bandwidth, peak = resources.bandwidth * 1e12, resources.tflops * 1e12 / slower(inputs)
        tokens = (self.prompts * self.prompt + self.rows * self.completion) / devices
        scored = self.rows * self.completion / devices
        linear = 2 * size.multiplied_by_a_token * tokens * passes + 2 * size.head * scored * self.head_passes
        own, shared = self.prompt + self.completion, self.prompts / self.rows
        attended = self.rows * (own**2 - (1 - shared) * self.prompt**2) / 2  # pairs: a token and those before it
        pairs = 4 * size.layers * size.attention_width * attended / devices
        attention = pairs * (self.forward + self.epochs * BACKWARD_ATTENTION) / peak
        weights = dtype_bytes * size.multiplied * self.micro_batches * passes
        updates = self.epochs * inputs.run.train.minibatches
        states = OPTIMIZER_BYTES * updates * size.trained / self.shards
        numbers = dtype_bytes * tokens * passes / bandwidth
        once, twice = (WIDE_HEAD_FORWARD, WIDE_HEAD_BACKWARD) if inputs.wide_head else (HEAD_FORWARD, HEAD_BACKWARD)
        of_a_logit = once * (self.scoring + self.epochs) + twice * self.epochs
        received = self._gathered_bytes(devices, updates) + self._exchanged_bytes(tokens)
        return Demand(
            linear=linear / peak + self._wide_head_flops() / devices / (resources.tflops * 1e12),
            attention=0.0 if self.flash_3 else attention,
            attention_3=attention if self.flash_3 else 0.0,
            activations=numbers * size.moved,
            adapters=numbers * size.adapted,
            weights=(weights + states) / bandwidth,
            logits=size.vocabulary * scored * of_a_logit / bandwidth,
            network=received / resources.link,
            layers=size.layers * self.micro_batches * (self.forward + self.epochs),
        )

    def seconds(self) -> float:
        """Seconds of a trainer, which waits for its host."""
        return max(self.demand().seconds(COSTS[self.inputs.resources.kind]), self.host_seconds())

    def host_seconds(self) -> float:
        """Seconds for which the host starts the operations, beside the GPU."""
        passes = self.micro_batches * (self.forward + self.epochs)
        return HOST[self.inputs.resources.kind] * operations(self.inputs.size.layers, passes, self.inputs.compiled)

    def _wide_head_flops(self) -> float:
        """FLOPs in the dtype of the computation that take as long as what a float32 head takes longer.

        A CPU multiplies in float32; a GPU multiplies the same operands into float32 sums, and gradients in two parts
        (`models/head.py`).
        """
        inputs = self.inputs
        if not inputs.wide_head:
            return 0.0
        once = 2 * inputs.size.head * self.rows * self.completion
        return once * (self.backward if inputs.resources.gpu else (FLOAT32_SLOWER["cpu"] - 1) * self.head_passes)

    def _gathered_bytes(self, devices: int, updates: int) -> float:
        """Bytes that a device receives: gathered weights, and gradients in float32."""
        size, others = self.inputs.size, (devices - 1) / devices
        if self.shards == 1:
            return 2 * FLOAT32 * size.trained * updates * others
        gathered = self.inputs.dtype_bytes * size.parameters * self.micro_batches * (self.scoring + 2 * self.epochs)
        reduced = FLOAT32 * size.trained * self.micro_batches * self.epochs
        return (gathered + reduced) * others

    def _exchanged_bytes(self, tokens: float) -> float:
        """Bytes that a device receives around attention from those it shares micro-batches with.

        Queries, keys and values of its tokens go out by heads and outputs come back, in every pass; heads of keys and
        values are repeated until they can be dealt out evenly.
        """
        size, sharing = self.inputs.size, self.inputs.run.hardware.context_parallel
        if sharing == 1:
            return 0.0
        keys = size.kv_heads * sharing // math.gcd(size.kv_heads, sharing)
        numbers = 2 * (size.heads + keys) * size.head_size * size.layers
        passes = self.forward + self.epochs
        return float(self.inputs.dtype_bytes * numbers * tokens * passes * (sharing - 1) / sharing)


def operations(layers: int, passes: float, compiled: bool = False) -> float:
    """The operations of torch in these passes of micro-batches, however large its tensors are."""
    return passes * (OF_A_PASS + (OF_A_COMPILED_LAYER if compiled else OF_A_LAYER) * layers)


def trainers_of(inputs: PlanInputs) -> int:
    """Devices that share the products of training: the cores of a CPU are one."""
    return inputs.resources.trainers if inputs.resources.gpu else 1


def slower(inputs: PlanInputs) -> float:
    """How much longer products take than in bfloat16."""
    return FLOAT32_SLOWER[inputs.resources.kind] if inputs.dtype == "float32" else 1.0


def forward_flops(size: ModelSize, prompt: int, completion: int) -> float:
    """FLOPs of a row: two per token and multiplied parameter (head: completion tokens only), and attention."""
    length = prompt + completion
    attention = 2 * size.layers * size.attention_width * length**2  # two products over half the pairs of tokens
    return 2 * size.multiplied_by_a_token * length + 2 * size.head * completion + attention


def _reference_passes(inputs: PlanInputs) -> float:
    """Forward passes of the reference, in units of the policy's; of several teachers each scores its share of rows."""
    run = inputs.run
    if not has_teacher(run.algorithm.kl):
        return float(run.algorithm.needs_reference)
    lengths = run.rollout.max_prompt_tokens, run.rollout.max_completion_tokens
    own = forward_flops(inputs.size, *lengths)
    passes = [forward_flops(teacher, *lengths) / own for teacher in inputs.teachers]
    return sum(passes) / len(passes) if passes else 0.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """Seconds for one token of each of n sequences on a server, or on a trainer's own weights, at a mean context."""

    inputs: PlanInputs
    context: float
    """Mean tokens before the one that is decoded."""
    costs: DecodeCosts

    @classmethod
    def of(cls, inputs: PlanInputs, context: float) -> Decoding:
        return cls(inputs, context, DECODE_COSTS[inputs.resources.kind])

    def parts(self, running: float) -> tuple[float, float, float]:
        """Seconds of reading, of products, and of the rest."""
        size, resources, costs = self.inputs.size, self.inputs.resources, self.costs
        devices = resources.tensor_parallel
        reads = self.weights_read(running) + running * self.context * size.cache_per_token
        reads = self.inputs.dtype_bytes * reads + self._head_bytes() * size.head
        products = 2 * running * (size.multiplied_by_a_token + size.head)
        products += 4 * running * self.context * size.layers * size.attention_width
        rest = costs.step + running * costs.sequence + (size.layers * costs.split_layer if devices > 1 else 0.0)
        reading = costs.reading * reads / (resources.bandwidth * 1e12 * devices)
        return reading, costs.compute * products / self._peak, rest

    def seconds(self, running: float) -> float:
        """Reading and products overlap, so the longer one counts."""
        reading, products, rest = self.parts(running)
        return max(reading, products) + rest

    def weights_read(self, running: float) -> float:
        """Weights below the head that a sequence needs: of a mixture, the experts that some token goes to."""
        size = self.inputs.size
        dense = size.multiplied - size.experts
        return float(dense + size.experts * (1 - (size.idle / size.experts) ** running)) if size.experts else dense

    def prefill(self, tokens: float) -> float:
        """Seconds for the tokens of prompts."""
        return self.costs.compute * 2 * tokens * self.inputs.size.multiplied_by_a_token / self._peak

    def table(self, most: int) -> Sequence[float]:
        """Seconds by the number of running sequences, from 0."""
        return [0.0, *(self.seconds(n) for n in range(1, most + 1))]

    @property
    def _peak(self) -> float:
        resources = self.inputs.resources
        return resources.tflops * 1e12 * resources.tensor_parallel / slower(self.inputs)

    def _head_bytes(self) -> int:
        """Bytes read and written for a number of the head at each token. vLLM on a CPU casts it each time."""
        inputs, in_process = self.inputs, samples_itself(self.inputs)
        if not inputs.wide_head or (inputs.resources.gpu and not in_process):
            return inputs.dtype_bytes
        return FLOAT32 if in_process else inputs.dtype_bytes + 2 * FLOAT32


def samples_itself(inputs: PlanInputs) -> bool:
    """Whether the trainer's own weights generate, without a sync."""
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers

    return isinstance(inputs.engine, Transformers | Fake)


def running_sequences(inputs: PlanInputs, length: float | None = None) -> int:
    """The most completions that a server generates at a time. length: mean tokens with prompts; None: full length."""
    if samples_itself(inputs) and hasattr(inputs.engine, "max_rows"):
        return sampled_rows(inputs)
    resources, option = inputs.resources, getattr(inputs.engine, "option", None)
    limit = option("max_num_seqs") if option else None
    if not limit:  # vLLM 0.32's defaults for a server (its `engine/arg_utils.py`)
        limit = (1024 if resources.memory >= LARGE else 256) if resources.gpu else 128
    room = server_sequences(inputs) if resources.servers else limit
    room *= inputs.run.rollout.longest_row / length if length else 1
    return int(min(limit, max(1, room)))


def sync_bytes(inputs: PlanInputs) -> float:
    """Bytes sent to the servers after an update."""
    if samples_itself(inputs) or inputs.run.algorithm.supervised:
        return 0.0
    return float(inputs.dtype_bytes * (inputs.size.adapter or inputs.size.parameters))


def sync_seconds(inputs: PlanInputs) -> float:
    return sync_bytes(inputs) / (LINK if inputs.resources.gpu else inputs.resources.bandwidth * 1e12 / 4)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step in which all prompts and completions have full length."""

    completions: int
    tokens: int
    """Those trained on."""
    generated: int
    """Tokens."""
    forward: float
    """FLOPs of all devices, as the next two."""
    backward: float
    generation: float
    sync_bytes: float
    seconds: dict[str, float]
    """Of each part, without overlap."""

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=lambda part: self.seconds[part])


def work(inputs: PlanInputs) -> Work:
    run, size, rollout, step = inputs.run, inputs.size, inputs.run.rollout, TrainingStep.of(inputs)
    prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
    of_prompt, of_row = forward_flops(size, prompt, 0), forward_flops(size, prompt, completion)
    # each prompt is generated from once for its group
    generation = rollout.prompts_per_step * of_prompt + step.rows * (of_row - of_prompt)
    once = generation if inputs.rows.packed else step.rows * of_row
    head = step.epochs * 2 * size.head * step.rows * completion  # the backward pass recomputes the logits
    sampled = not run.algorithm.supervised  # else its completions are the data's
    reading, products, launches = _decoding_seconds(inputs) if sampled else (0.0, 0.0, 0.0)
    demand, costs = step.demand(), COSTS[inputs.resources.kind]
    return Work(
        completions=step.rows,
        tokens=int(step.prompts * prompt + step.rows * completion),
        generated=sampled * step.rows * completion,
        forward=step.forward * once,
        backward=step.backward * once + head,
        generation=sampled * generation,
        sync_bytes=sync_bytes(inputs),
        seconds={
            "training: compute": max(demand.part(*COMPUTE).seconds(costs), step.host_seconds()),
            "training: network": demand.part("network").seconds(costs),
            "generation: compute": products,
            "generation: memory bandwidth of decoding": reading,
            "generation: launches and scheduling": launches,
            "weight sync": sync_seconds(inputs),
        },
    )


def _decoding_seconds(inputs: PlanInputs) -> tuple[float, float, float]:
    """Seconds of reading, of products, and of the rest, in which the busiest server generates its share."""
    rollout = inputs.run.rollout
    copies = inputs.resources.servers or trainers_of(inputs)
    rows = math.ceil(rollout.prompts_per_step * rollout.group_size / copies)
    at_once = max(1, min(rows, running_sequences(inputs)))
    tokens = math.ceil(rows / at_once) * rollout.max_completion_tokens
    decoding = Decoding.of(inputs, rollout.max_prompt_tokens + rollout.max_completion_tokens / 2)
    reading, products, rest = decoding.parts(at_once)
    prompts = decoding.prefill(rollout.prompts_per_step / copies * rollout.max_prompt_tokens)
    return tokens * reading, tokens * products + prompts, tokens * rest
