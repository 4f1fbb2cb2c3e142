"""The memory of one micro-batch, from the trainer's forward and backward pass on fake tensors.

Fake tensors have shapes and no numbers, and pass through every operation, autocast and gradient checkpointing
included. So the bytes are those of the model's own code and of `completion_scores`; no architecture needs a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpocli.models import flex_attention
from grpocli.models import shared_prompt_attention as attention
from grpocli.models.frozen_linear import multiply
from grpocli.models.loading import checkpoint_activations
from grpocli.training import logprobs
from grpocli.training.logprobs import completion_scores, mark_head, output_head
from grpocli.training.packing import FlexPacked, MicroBatch, Packed, Padded
from grpocli.types import Row
from grpocli_tools.plan.model_size import empty_model, quantized_linear, with_layers
from grpocli_tools.plan.resources import shares_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from grpocli.config.schema import Run
    from grpocli_tools.plan.model_size import ModelSize

TRACED_LAYERS = 4
"""Decoder layers of the traced model; the bytes of a deeper model are extrapolated from this depth and half of it."""
_traced: dict[str, tuple[int, int, int]] = {}
"""Results of this process, as plans of other devices, optimizers or algorithms share them."""


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """A micro-batch of completions of full length."""

    groups: tuple[int, ...]
    """Completions of each prompt."""
    prompt: int
    """Tokens."""
    completion: int
    """Tokens."""
    packed: bool
    """Rows lie end to end, and each prompt is computed once."""
    gpu: bool = False
    flex: bool = False
    """Attention over packed rows is `flex_attention`'s."""

    @property
    def rows(self) -> int:
        return sum(self.groups)

    @property
    def prompts(self) -> int:
        return len(self.groups) if self.packed else self.rows

    @property
    def tokens(self) -> int:
        return self.prompts * self.prompt + self.rows * self.completion


TWO_TOKENS = MicroBatchShape((1,), 1, 1, packed=False)
"""A micro-batch so small that it keeps only the casts of weights."""


@dataclass(frozen=True, slots=True)
class TracedMemory:
    """Bytes of a micro-batch."""

    casts: int = 0
    """Weights cast to the dtype of the computation."""
    activations: int = 0
    """Tensors that decoder layers keep for the backward pass."""
    logits: int = 0
    """Tensors kept outside of them, for the output head."""
    peak: int = 0
    """Further tensors at the peak."""

    @property
    def total(self) -> int:
        return self.casts + self.activations + self.logits + self.peak

    def shared_by(self, processes: int) -> TracedMemory:
        """Bytes of one of the processes that share the micro-batch (`hardware.context_parallel`)."""
        return TracedMemory(self.casts, self.activations // processes, self.logits // processes, self.peak // processes)


def trace(run: Run, size: ModelSize, shape: MicroBatchShape, dtype: torch.dtype) -> TracedMemory:
    """Peak bytes of one micro-batch, beside weights, gradients and optimizer.

    With sharded weights, layers are gathered in `dtype`, and nothing is cast.
    """
    outside, of_layer = _bytes_by_layer(run, size, shape, dtype)
    casts_outside, casts_of_layer = 0.0, 0.0
    if dtype != torch.float32 and not shares_weights(run):
        found = _bytes_by_layer(run, size, TWO_TOKENS, dtype)
        casts_outside, casts_of_layer = found[0][0], found[1][0]
    casts = round(casts_outside + size.layers * casts_of_layer)
    activations = round(size.layers * (of_layer[0] - casts_of_layer))
    logits = round(outside[0] - casts_outside)
    peak = round(max(outside[1:] + size.layers * of_layer[1:]))
    return TracedMemory(casts, activations, logits, peak - casts - activations - logits)


def _bytes_by_layer(
    run: Run, size: ModelSize, shape: MicroBatchShape, dtype: torch.dtype
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The results [3] of `micro_batch_bytes` outside of decoder layers, and in each: they grow linearly with depth."""
    many = min(TRACED_LAYERS, size.layers)
    few = many // 2
    at_many = np.array(micro_batch_bytes(run, size.config, many, shape, dtype), dtype=float)
    at_few = np.array(micro_batch_bytes(run, size.config, few, shape, dtype)) if few else np.zeros(3)
    of_layer = (at_many - at_few) / (many - few)
    return at_many - many * of_layer, of_layer


def micro_batch_bytes(
    run: Run, config: Any, layers: int, shape: MicroBatchShape, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Bytes after the forward pass, at its peak, and at the peak of the backward pass; without gradients."""
    key = repr(
        (
            with_layers(config, layers).to_json_string(use_diff=False),
            (run.model, run.rollout.sampling, run.algorithm.needs_entropy_gradient, shares_weights(run)),
            (run.train.gradient_checkpointing, shape, dtype),
        )
    )
    if key not in _traced:
        _traced[key] = _micro_batch_bytes(run, config, layers, shape, dtype)
    return _traced[key]


def _micro_batch_bytes(
    run: Run, config: Any, layers: int, shape: MicroBatchShape, dtype: torch.dtype
) -> tuple[int, int, int]:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    fake = FakeTensorMode()
    with FakeCopyMode(fake):  # building the rows from fake tensors takes several times as long
        batch = deepcopy(_batch(shape))
    model = empty_model(with_layers(config, layers), run.model).train()
    if shape.packed:
        attention.enable(model, shape.prompt + shape.completion)
    quantized = bool(getattr(run.model, "quantization", None))
    with fake, _fake_kernels():
        quantize(model, run.model, dtype)
        _fake_weights(model, dtype if shares_weights(run) else torch.float32, frozen=dtype if quantized else None)
        if run.train.gradient_checkpointing:
            checkpoint_activations(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        at_head = _ends_with_its_head(model)
        ignored = [*model.parameters(), *model.buffers(), *(p.grad for p in trained if p.grad is not None)]
        with AllocationTracker(ignored) as allocated:
            plain = dtype == torch.float32 or shares_weights(run)
            computing: Any = nullcontext() if plain else torch.autocast("cpu", dtype=dtype)
            gradient = run.algorithm.needs_entropy_gradient
            logp, entropy, _ = completion_scores(
                model, batch, run.rollout.sampling, computing, gradient, at_head, on_cpu=not shape.gpu
            )
            kept, forward = allocated.live, allocated.peak
            if shape == TWO_TOKENS:
                return kept, forward, kept
            allocated.peak = kept
            (logp.sum() + entropy.sum()).backward()
    return kept, forward, allocated.peak


@contextmanager
def _fake_kernels() -> Iterator[None]:
    """A block with stand-ins for what fake tensors of a CPU lack, or take long for.

    Flex attention has no backward pass there, and a mixture's product of experts is in bfloat16 only. A CPU's scores
    have so many small pieces that tracing takes seconds, and are never the peak. torch 2.11 takes the head's sum of
    products in float32 for another operation.
    """
    from transformers.integrations import moe

    def product(input: Tensor, weight: Tensor, offs: Tensor) -> Any:
        return _GroupedProduct.apply(input, weight, offs)  # type: ignore[no-untyped-call]

    def scores(hidden_nH: Tensor, *others: Any) -> Tensor:
        return hidden_nH.new_empty(4, len(hidden_nH), dtype=torch.float32)

    before = moe._grouped_mm, flex_attention._kernel, logprobs._row_scores, logprobs.add_product_
    moe._grouped_mm, logprobs._row_scores = product, scores  # type: ignore[assignment]
    logprobs.add_product_ = lambda *_: None
    flex_attention._kernel = lambda: _FlexAttention.call  # type: ignore[assignment]
    try:
        yield
    finally:
        moe._grouped_mm, flex_attention._kernel, logprobs._row_scores, logprobs.add_product_ = before


class _GroupedProduct(torch.autograd.Function):
    """The shapes and saved tensors of a product of rows [S, in] with one of the experts' weights [E, in, out] each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows.to(weights.dtype), weights)
        return weights.new_empty(rows.shape[0], weights.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights), None


class _FlexAttention(torch.autograd.Function):
    """The shapes and saved tensors of flex attention."""

    @classmethod
    def call(cls, *states: Tensor, **how: Any) -> Tensor:
        output: Tensor = cls.apply(*states)  # type: ignore[no-untyped-call]
        return output

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(state) for state in ctx.saved_tensors[:3])


def _ends_with_its_head(model: torch.nn.Module) -> bool:
    """Whether the logits are the head's output itself, judged by identity because fake tensors have no numbers."""
    if (head := output_head(model)) is None:
        return False
    found, mark = mark_head(head, model)
    return found is mark


class _Quantized(torch.nn.Linear):
    """A layer whose weight is there only while it is multiplied. A layer of a model becomes one by its class."""

    computes_in: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self)

    def dequantized(self) -> Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=self.computes_in)


def quantize(model: torch.nn.Module, part: Any, dtype: torch.dtype) -> None:
    """Let the layers that model.quantization names behave as theirs of 4 bits do."""
    for layer in quantized_linear(model, part):
        layer.__class__ = _Quantized
        layer.computes_in = dtype  # type: ignore[assignment]


def _fake_weights(model: torch.nn.Module, dtype: torch.dtype, frozen: torch.dtype | None = None) -> None:
    """Replace parameters and buffers on the meta device by fake tensors of a CPU, which autocast and attention accept.

    Parameters become `dtype`, those without a gradient `frozen`; tied ones stay tied.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    like = torch.empty(parameter.shape, dtype=dtype if parameter.requires_grad else frozen or dtype)
                    made[id(parameter)] = torch.nn.Parameter(like, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _batch(shape: MicroBatchShape) -> MicroBatch:
    made = [
        Row(
            [number] * shape.prompt,
            [0] * shape.completion,
            [1] * shape.completion,
            0.0,
            number,
            [0.0] * shape.completion,
        )
        for number, group in enumerate(shape.groups)
        for _ in range(group)
    ]
    cpu = torch.device("cpu")
    batch = MicroBatch.build(made, cpu)
    if not shape.packed:  # with a mask, as for rows of different lengths
        return replace(batch, layout=replace(cast(Padded, batch.layout), full=False))
    layout = FlexPacked if shape.flex else Packed
    return replace(batch, layout=layout.build(made, cpu, on_cpu=not shape.gpu))


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of tensors that are allocated while the context is active, fake tensors included.

    live: bytes now; peak: the most so far. ignored: earlier tensors, which do not count.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(t.untyped_storage() for t in ignored)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes
