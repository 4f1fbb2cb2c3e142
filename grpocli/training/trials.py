"""Trials of a loaded model before the first update: packed rows, log-probs at its output head, compiled layers.

`model.compile`: decoder layers go through `torch.compile`, for micro-batches of any size. With `flex_attention` a layer
is one graph. `sdpa` over packed rows stays outside of graphs, since its Python depends on the rows of each micro-batch.
All layers of one class share their graphs. Sampling in this process does not use them (`Policy.sampling_mode`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from grpocli.distributed.fsdp2 import layers
from grpocli.errors import ConfigError
from grpocli.models import shared_prompt_attention as attention
from grpocli.models.flex_attention import TiledMask, for_any_size
from grpocli.models.loading import FLEX
from grpocli.training.logprobs import completion_scores, mark_head, output_head
from grpocli.training.packing import FlexPacked, Layout, MicroBatch, Packed, Padded, shards_of
from grpocli.training.policy import Reference
from grpocli.training.router_balance import routers
from grpocli.training.teachers import LoadedTeacher, Teachers, loaded_teachers
from grpocli.types import Row, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.models.shared_prompt_attention import Attends
    from grpocli.training.policy import Policy

logger = logging.getLogger(__name__)

BFLOAT16_TOLERANCE = 0.05
"""Largest relative difference of log-probs between packed and padded rows in bfloat16, whose rounding gives 0.03."""
FLOAT32_TOLERANCE = 1e-4
"""The same in float32."""
GRADIENTS = 4
"""Gradients of a kernel may differ by so many times as much as its output: they are rounded more often."""
COMPILE_OPTIONS: dict[str, Any] = {"dynamic": True}
"""Arguments of torch.compile: one graph for micro-batches of any size."""
LARGE = 100_000_000
"""Parameters from which layers are compiled on a GPU if the config does not say. On an H100 an update of 0.5B took half
of the time of eager layers, 0.45 s less, after a start of 18 s more."""


def choose_layout(run: Run, world: World, policy: Policy, reference: Reference | Teachers | None) -> Iterator[str]:
    """Turn on packing and log-probs at the output head if the model supports them, otherwise yield a note; compile."""
    for teacher in loaded_teachers(reference):
        find_head(teacher, world)
    if not find_head(policy, world):
        yield "all logits of a micro-batch are kept: this model changes what its output head returns"
    if run.train.packed:
        wanted, packs = policy.packed, pack(policy, reference, world, run.rollout.longest_row)
        why = f"attention (model.attention={run.model.attention or 'null'}) does not take rows end to end"
        if run.model.attention == FLEX and not (packs and policy.packed is FlexPacked):
            problem = "needs full attention in every layer, and a kernel whose two passes run with the right log-probs"
            raise ConfigError(problem, key="model.attention", value=FLEX, hint="set it to null")
        if not packs and world.context_parallel:
            key, size = "hardware.context_parallel", world.context_parallel.size
            raise ConfigError(f"this model's {why}", key=key, value=size, hint="set it to 1")
        if not packs:
            yield f"micro-batches are padded: this model's {why}"
        elif policy.packed is not wanted:
            yield f"attention is sdpa's: torch's {FLEX} failed its trial on this GPU, see run.log"
    flex = world.device.type == "cuda" and policy.layout(update_sampling(run)) is FlexPacked
    parameters = sum(one.numel() for one in policy.model.parameters())
    if takes_compiled(run, world.size, flex, parameters, bool(routers(policy.model))):
        problem = compile_layers(policy, reference, world)
        if problem and run.model.compile:
            raise ConfigError(problem, key="model.compile", value="true", hint="set it to false")
        if problem:
            yield f"decoder layers are not compiled, see run.log: {problem}"
    if run.model.lora.rank:
        trained = sum(one.numel() for one in policy.model.parameters() if one.requires_grad)
        yield f"LoRA trains {trained:,} parameters"


def update_sampling(run: Run) -> Sampling:
    """The sampling under which updates compute log-probs; answers of the data are not sampled."""
    return Sampling(run.rollout.max_completion_tokens) if run.algorithm.supervised else run.rollout.sampling


def find_head(owner: Policy | LoadedTeacher, world: World) -> bool:
    """Set and return whether the model's logits are exactly the output of its output head. Collective."""

    def tried() -> bool:
        logits, mark = _marks(owner)
        return logits.shape == mark.shape and torch.equal(logits.float(), mark.float())

    owner.at_head = not world.any(output_head(owner.model) is None or not passes(tried))
    return owner.at_head


def _marks(policy: Policy | LoadedTeacher) -> tuple[Tensor, Tensor]:
    head = output_head(policy.model)
    assert head is not None
    with policy.parallel.autocast(policy.model, torch.float32):
        return mark_head(head, policy.model)


def pack(
    policy: Policy, reference: Reference | Teachers | None, world: World | None = None, longest: int = sys.maxsize
) -> bool:
    """Switch all models to packed rows if that gives the log-probs of padded rows; return whether it does. Collective.

    Sets `policy.packed` to the layout of `sdpa` if `flex_attention` fails. longest: the most tokens of a row. A
    reference that is not a teacher has the policy's architecture.
    """
    models = [policy.model, *(reference.models if reference else [])]
    tested: list[Policy | LoadedTeacher] = [policy, *loaded_teachers(reference)]

    def all_agree(*given: Any) -> bool:
        agreed = passes(lambda: all(agrees(one, *given) for one in tested))
        return not world.any(not agreed) if world else agreed

    heads = all(output_head(one.model) is not None for one in tested)
    policy.packs = all(attention.enable(model, longest) for model in models) and heads and all_agree(Packed)
    if not policy.packs:
        for model in models:
            attention.disable(model)
    elif policy.packed is FlexPacked:
        with for_any_size():
            policy.packed = FlexPacked if all_agree(FlexPacked, policy.dtype) else Packed
    return policy.packs


def passes(test: Callable[[], bool]) -> bool:
    """The answer of a test; False if the model raises. Errors of the machine are raised."""
    try:
        return test()
    except (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError):
        raise
    except (TypeError, ValueError, IndexError, RuntimeError):
        logger.info("a test of the model raised an error, which counts as no", exc_info=True)
        return False


def agrees(policy: Policy | LoadedTeacher, layout: type[Packed] = Packed, dtype: torch.dtype = torch.float32) -> bool:
    """Whether packed and padded rows have the same log-probs in `dtype`, and packed rows are independent."""
    rows = trial_rows(policy)
    exact = _marks(policy)[1].dtype == dtype == torch.float32
    padded, tolerance = _logp(policy, rows, Padded, dtype), FLOAT32_TOLERANCE if exact else BFLOAT16_TOLERANCE
    packed = _logp(policy, rows, layout, dtype)
    shared = shards_of(policy.shared_with, layout) if policy.shared_with else None
    tried = [packed, *([_logp(policy, rows, shared, dtype)] if shared else [])]
    if not all(is_close(logp, padded, tolerance) for logp in tried):
        return False
    first = len(rows[0].completion_ids)
    other = replace(rows[0], completion_ids=rows[0].completion_ids[::-1])
    # only in float32: the rounding of a mixture's experts depends on how many rows each has
    return dtype != torch.float32 or torch.equal(_logp(policy, [other, *rows[1:]], layout)[first:], packed[first:])


@dataclass(frozen=True, slots=True)
class _Tried:
    """Attention that runs the backward pass of each call at once.

    Raises ValueError if a kernel's output or gradients are not those of the dense form of its mask.
    """

    attention: Attends

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
        output, *gradients = _both_passes(self.attention, query, key, value, how)
        if isinstance(self.attention, TiledMask) and self.attention.dense is None:
            tolerance = FLOAT32_TOLERANCE if output.dtype == torch.float32 else BFLOAT16_TOLERANCE
            expected, *others = _both_passes(self.attention.dense_form(), query, key, value, how)
            same = (is_close(one, other, GRADIENTS * tolerance) for one, other in zip(gradients, others, strict=True))
            if not (is_close(output, expected, tolerance) and all(same)):
                raise ValueError("the kernel of flex_attention has another output than sdpa, or other gradients")
        return output


def _both_passes(attention: Attends, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> list[Tensor]:
    """The output of attention, and the gradients of queries, keys and values for the sum of its squares."""
    with torch.enable_grad():
        query, key, value = (state.detach().requires_grad_() for state in (query, key, value))
        output = attention.attend(query, key, value, how)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), (query, key, value))]


@torch.no_grad()
def _logp(
    policy: Policy | LoadedTeacher, rows: list[Row], layout: type[Layout], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log-probs of all completion tokens, row by row. Attention of packed rows runs its backward pass, too."""
    batch = MicroBatch.build(rows, policy.model.device, layout)
    if isinstance(batch.layout, Packed):
        batch = replace(batch, layout=replace(batch.layout, segments=_Tried(batch.layout.segments)))
    context = policy.parallel.autocast(policy.model, dtype)
    scores = completion_scores(policy.model, batch, Sampling(1), context, at_head=policy.at_head)
    return scores.logp[batch.mask.bool()]


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether the relative difference is at most `tolerance`; False if either is NaN."""
    return bool((a - b).abs().mean() <= tolerance * b.abs().mean())


def trial_rows(policy: Policy | LoadedTeacher) -> list[Row]:
    """Two groups of two rows, one that fits into one block of attention and one that needs two."""
    config = policy.model.config.get_text_config()
    long = min(
        attention.MIN_TOKENS // 2, (getattr(config, "max_position_embeddings", None) or attention.MIN_TOKENS) - 8
    )
    lengths = [4, 7, long, long + 3]
    ids = [k % config.vocab_size for k in range(3, 3 + 5 + max(lengths))]
    return [Row(ids[:5], ids[5 : 5 + n], [1] * n, 0.0, k // 2, [0.0] * n) for k, n in enumerate(lengths)]


def takes_compiled(run: Run, processes: int, flex: bool, parameters: int, experts: bool) -> bool:
    """Whether a run tries compiled layers. flex: with flex attention on a GPU. experts: of a mixture."""
    if run.model.compile is not None:
        return bool(run.model.compile)
    whole = processes == 1 or (run.hardware.parallel == "ddp" and run.hardware.context_parallel == 1)
    plain = not (experts or run.model.quantization)
    return flex and whole and plain and parameters >= LARGE


def compile_layers(policy: Policy, reference: Reference | Teachers | None, world: World) -> str:
    """Compile the layers of the policy, and of a reference that is not a teacher; return why not, or "". Collective.

    For the same few rows in every session, so that a resume has the same graphs. Layers stay eager, in every process,
    unless log-probs stay the same.
    """
    if routers(policy.model):
        return "the hooks that watch a mixture of experts would be compiled again for each micro-batch"
    follower = reference if isinstance(reference, Reference) else None
    expected = _trial_logps(policy, follower)
    if policy.packs:
        attention.register(in_graphs=policy.packed is FlexPacked and not world.context_parallel)
    models = {id(one): one for one in (policy.model, *(follower.models if follower else ()))}
    compiled = [layer for model in models.values() for layer in layers(model)]
    for layer in compiled:
        layer.compile(**COMPILE_OPTIONS)
    tolerance = FLOAT32_TOLERANCE if policy.dtype == torch.float32 else BFLOAT16_TOLERANCE

    def tried() -> bool:
        found = _trial_logps(policy, follower)
        return all(is_close(one, other, tolerance) for one, other in zip(found, expected, strict=True))

    with for_any_size():
        policy.compiles = not world.any(not passes(tried))
    if policy.compiles:
        return ""
    for layer in compiled:
        layer._compiled_call_impl = None  # as before `compile`
    needs = "a C++ compiler on a CPU, Triton on a GPU"
    return f"torch cannot compile this model's decoder layers ({needs}), or not to the same log-probs"


def _trial_logps(policy: Policy, follower: Reference | None) -> list[Tensor]:
    """Log-probs of the trial's rows, with and without gradients, and the reference's; norms of gradients, if `ddp`."""
    policy.model.train()
    batch = MicroBatch.build(trial_rows(policy), policy.model.device, policy.layout(Sampling(1)))
    kept_BT, found = batch.mask.bool(), []
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            scores = completion_scores(policy.model, batch, Sampling(1), policy.autocast(), at_head=policy.at_head)
            logp_BT = scores.logp
        found.append(logp_BT.detach()[kept_BT])
        if gradient and policy.parallel.replicated:
            trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
            gradients = torch.autograd.grad(logp_BT[kept_BT].sum(), trained, allow_unused=True)
            found.append(torch.stack([one.norm() for one in gradients if one is not None]))
    if follower:
        found.append(follower.logp(batch, Sampling(1))[kept_BT])
    return found
