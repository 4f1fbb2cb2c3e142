"""Checks after an update, which stop the run before its weights are saved or sampled with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpocli.errors import RunError
from grpocli.runs.run_dir import resume_word
from grpocli.training.resume_point import latest
from grpocli.training.update import SCALE, SKIPPED

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.runs.run_dir import RunDir
    from grpocli.training.policy import Policy


OTHER_DTYPE = "set model.dtype=bfloat16, or float32 on a device without it"


def overflow_warning(metrics: Mapping[str, float]) -> dict[str, str]:
    """A warning, by its kind, if an update was skipped."""
    if not (n := metrics.get(SKIPPED)):
        return {}
    skipped = f"gradients overflowed float16: {n} skipped update{'s' * (n > 1)}, loss scale now {metrics[SCALE]:,.0f}"
    return {"overflow": f"{skipped}. This is normal at the start and now and then; if it goes on, {OTHER_DTYPE}"}


@dataclass(frozen=True, slots=True)
class UpdateChecks:
    """Checks that raise RunError if an update diverged, or if the engine reported wrong log-probs."""

    run: Run
    run_dir: RunDir
    policy: Policy
    world: World

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check step number `step` (from 1) after its update. Collective."""
        self._loss(step, metrics)
        self._sampler(step, metrics)
        self._weights(step)

    def _loss(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get(SCALE, 1.0) < 1:
            raise RunError(
                f"step {step}: gradients overflow float16 even without a scale of the loss: {OTHER_DTYPE}. If the "
                f"weights have diverged, {self._remedy(step)}"
            )
        for name in ("loss", "grad_norm"):
            value = metrics.get(name, 0.0)
            if not math.isfinite(value) and not metrics.get(SKIPPED):
                raise RunError(f"step {step}: {name} is {value}; {self._remedy(step)}")

    def _sampler(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the engine's log-probs with the policy's.

        Skipped for constrained decoding and rollouts of older weights, whose log-probs differ in any case, and for
        log-probs that overflow.
        """
        rollout, error = self.run.rollout, metrics.get("token_mult_prob_error", 1.0)
        off_policy = metrics.get("staleness/max", 0) > 0 or metrics.get("sampling/carried", 0) > 0
        overflowed = math.isnan(error) and bool(metrics.get(SKIPPED))  # in the trainer's forward
        bound = None if rollout.sampling.structure or off_policy or overflowed else rollout.max_prob_error
        if bound is not None and not error <= bound:
            raise RunError(
                f"step {step}: token_mult_prob_error is {error:.4g}, above rollout.max_prob_error={bound:g}: the "
                "engine's log-probs are not those of the trainer's weights; the step is not saved"
            )

    def _weights(self, step: int) -> None:
        """Refuse infinite and NaN weights. The loss would only show them in the next step."""
        parameters = (p for p in self.policy.model.parameters() if p.requires_grad)
        tensors = [getattr(p, "ds_tensor", p.detach()) for p in parameters]  # where ZeRO-3 keeps the shard
        shards = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        # the cheapest pass over all weights, whose squares may overflow before they do
        finite = bool(torch.nn.utils.get_total_norm(shards).isfinite()) or all(bool(t.isfinite().all()) for t in shards)
        if self.world.any(not finite):
            remedy = self._remedy(step, began_finite=True)
            raise RunError(f"step {step}: its update left weights that are not finite; {remedy}")

    def _remedy(self, step: int, began_finite: bool = False) -> str:
        """The user's remedy after a failed update.

        began_finite: the weights before the update were finite, so a resume from their checkpoint helps.
        """
        change = f"lower optim.lr={self.run.optim.lr}, or set optim.max_grad_norm"
        last = latest(self.run_dir.checkpoints)
        if last is None:
            return f"{change}, and begin again: there is no checkpoint yet"
        if last == self.run_dir.checkpoint(step - 1) and not began_finite:
            return f"{change}, and remove {last}: it holds the weights that this step began with"
        return f"{change}, and go on from the last checkpoint with {resume_word(self.run_dir.path)}"
