"""model.compile: the decoder layers of a model through `torch.compile`, for micro-batches of any size.

With `flex_attention` a layer is one graph. `sdpa` over packed rows stays outside of graphs, since its Python depends on
the rows of each micro-batch. All layers of one class share their graphs. Sampling in this process does not use them
(`Policy.sampling_mode`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpocli.distributed.fsdp2 import layers
from grpocli.models import shared_prompt_attention as attention
from grpocli.models.flex_attention import for_any_size
from grpocli.models.routers import routers
from grpocli.training.logprobs import completion_logp
from grpocli.training.micro_batch import MicroBatch
from grpocli.training.packing import FlexPacked
from grpocli.training.packing_check import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, is_close, passes, trial_rows
from grpocli.training.policy import Reference
from grpocli.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.training.policy import Policy
    from grpocli.training.teachers import Teachers


HOW: dict[str, Any] = {"dynamic": True}
"""Arguments of torch.compile: one graph for micro-batches of any size."""
LARGE = 100_000_000
"""Parameters from which layers are compiled on a GPU if the config does not say.

On an H100 an update of 0.5B took half of the time of eager layers, 0.45 s less, after a start of 18 s more, or 8 s with
torch's cache.
"""


def takes_compiled(run: Run, processes: int, flex: bool, parameters: int, experts: bool) -> bool:
    """Whether a run tries compiled layers. flex: with flex attention on a GPU. experts: of a mixture."""
    if run.model.compile is not None:
        return bool(run.model.compile)
    whole = processes == 1 or (run.hardware.parallel == "ddp" and run.hardware.context_parallel == 1)
    plain = not (experts or run.model.quantization or run.train.activation_offload)
    return flex and whole and plain and parameters >= LARGE


def compile_layers(policy: Policy, reference: Reference | Teachers | None, world: World) -> str:
    """Compile the layers of the policy, and of a reference that is not a teacher; return why not, or "". Collective.

    They are compiled for the same few rows in every session, so that a resume has the same graphs. They stay eager, in
    every process, unless log-probs stay the same.
    """
    if routers(policy.model):
        return "the hooks that watch a mixture of experts would be compiled again for each micro-batch"
    follower = reference if isinstance(reference, Reference) else None
    expected = _logps(policy, follower)
    if policy.packs:
        attention.register(in_graphs=policy.packed is FlexPacked and not world.context_parallel)
    models = {id(one): one for one in (policy.model, *(follower.models if follower else ()))}
    compiled = [layer for model in models.values() for layer in layers(model)]
    for layer in compiled:
        layer.compile(**HOW)
    tolerance = FLOAT32_TOLERANCE if policy.dtype == torch.float32 else BFLOAT16_TOLERANCE

    def tried() -> bool:
        found = _logps(policy, follower)
        return all(is_close(one, other, tolerance) for one, other in zip(found, expected, strict=True))

    with for_any_size():
        policy.compiles = not world.any(not passes(tried))
    if policy.compiles:
        return ""
    for layer in compiled:
        layer._compiled_call_impl = None  # as before `compile`
    needs = "a C++ compiler on a CPU, Triton on a GPU"
    return f"torch cannot compile this model's decoder layers ({needs}), or not to the same log-probs"


def _logps(policy: Policy, follower: Reference | None) -> list[Tensor]:
    """Log-probs of the trial's rows, as an update computes them: with and without gradients, and the reference's.

    And the norms of gradients, where no process has to wait for others in the backward pass.
    """
    policy.model.train()
    batch = MicroBatch.build(trial_rows(policy), policy.model.device, policy.layout(Sampling(1)))
    kept_BT, found = batch.mask.bool(), []
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            logp_BT, _ = completion_logp(policy.model, batch, Sampling(1), policy.autocast(), at_head=policy.at_head)
        found.append(logp_BT.detach()[kept_BT])
        if gradient and policy.parallel.replicated:
            trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
            gradients = torch.autograd.grad(logp_BT[kept_BT].sum(), trained, allow_unused=True)
            found.append(torch.stack([one.norm() for one in gradients if one is not None]))
    if follower:
        found.append(follower.logp(batch, Sampling(1))[kept_BT])
    return found
