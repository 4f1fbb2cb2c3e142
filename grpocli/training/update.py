"""The optimizer updates of one step: windows of groups, each a sum of micro-batch losses over all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from grpocli.algorithm.aggregate import Totals
from grpocli.training.batch import EMPTY, MicroBatch, Row, deal, pack, windows

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Train
    from grpocli.data import Sampling
    from grpocli.training.optim import AdamW
    from grpocli.training.policy import Policy
    from grpocli.training.reference import Reference
    from grpocli.training.world import World


@dataclass(slots=True)
class Updater:
    """Turns rows into optimizer updates. `updates` counts them since the start of the run."""

    world: World
    policy: Policy
    reference: Reference | None
    algorithm: Algorithm
    optim: AdamW
    optimizer: torch.optim.Optimizer
    train: Train
    sampling: Sampling
    total_updates: int
    updates: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def step(self, rows: Sequence[Row], n_groups: int) -> dict[str, float]:
        """Train on one step's rows (the same in every process); metrics are means over its updates."""
        self.sums = {}
        self.policy.wrapped.train()
        spans = windows(n_groups, self.train.minibatches)
        plans = [self._plan([r for r in rows if r.group in span]) for span in spans]
        several = self.train.epochs * len(spans) > 1
        for plan in plans:
            self._score_before(plan, old=several)
        for _ in range(self.train.epochs):
            for plan in plans:
                self._update(plan)
        return self._metrics(self.train.epochs * len(spans), rows)

    def _plan(self, rows: list[Row]) -> _Plan:
        """Deal a window's rows; every process gets as many micro-batches as the busiest one."""
        shares = [pack(share, self.train.micro_batch_tokens) for share in deal(rows, self.world.size)]
        most = max(len(share) for share in shares)
        mine = shares[self.world.rank]
        totals = Totals.from_lengths(
            torch.tensor([r.advantage for r in rows]),
            torch.tensor([sum(r.mask) for r in rows]),
            torch.tensor([r.group for r in rows]),
            micro_batches=sum(len(share) for share in shares),
        )
        return _Plan([*mine, *[[EMPTY]] * (most - len(mine))], totals.to(self.world.device))

    def _score_before(self, plan: _Plan, old: bool) -> None:
        """Log-probs under the reference and, where several updates follow, under the policy that starts the step."""
        if self.reference is None and not old:
            return
        for rows in plan.micro_batches:
            batch = MicroBatch.build(rows, self.world.device)
            old_logp = self.policy.logp_without_gradient(batch, self.sampling) if old else None
            ref_logp = self.reference.logp(batch, self.sampling) if self.reference else None
            for i, row in enumerate(rows):
                n = len(row.completion_ids)
                row.old_logp = None if old_logp is None else old_logp[i, :n]
                row.ref_logp = None if ref_logp is None else ref_logp[i, :n]

    def _update(self, plan: _Plan) -> None:
        for i, rows in enumerate(plan.micro_batches):
            last = i + 1 == len(plan.micro_batches)
            with self.world.accumulating(self.policy.wrapped, last):
                self._micro_batch(MicroBatch.build(rows, self.world.device), plan.totals)
        rate = self.optim.rate(self.updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parameters = [p for p in self.policy.model.parameters() if p.grad is not None]
        limit = self.optim.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        self._add({"grad_norm": norm.detach() / self.world.size})
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def _micro_batch(self, batch: MicroBatch, totals: Totals) -> None:
        logp, entropy = self.policy.logp(batch, self.sampling)
        loss, metrics = self.algorithm.loss(
            logp,
            logp.detach() if batch.old_logp is None else batch.old_logp,
            batch.advantages,
            batch.mask,
            group_ids=batch.group_ids,
            ref_logp=batch.ref_logp,
            rollout_logp=batch.rollout_logp,
            totals=totals,
        )
        self.world.backward(loss)
        metrics["loss"] = loss.detach()
        metrics["entropy"] = (entropy * batch.mask).sum() / max(totals.tokens, 1)
        self._add(metrics)

    def _add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _metrics(self, n_updates: int, rows: Sequence[Row]) -> dict[str, float]:
        """One transfer for the whole step."""
        tokens: dict[str, Any] = {
            "tokens/trained": sum(sum(r.mask) for r in rows) * self.train.epochs,
            "lr": self.optim.rate(max(self.updates - 1, 0), self.total_updates),
        }
        if not self.sums:
            return tokens
        names = sorted(self.sums)
        means = self.world.sum(torch.stack([self.sums[n].float() for n in names])) / n_updates
        return tokens | dict(zip(names, means.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Plan:
    """This process's micro-batches of one window, and the counts of the whole window."""

    micro_batches: list[list[Row]]
    totals: Totals
