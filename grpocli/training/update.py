"""The optimizer updates of one step.

Each update trains on a window of groups: the sum of micro-batch losses over all processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.metrics import EXTREMES, OF_COMPUTED, combined
from grpocli.progress import Progress, unreported
from grpocli.training.micro_batch import MicroBatch, windows
from grpocli.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Train
    from grpocli.distributed.world import World
    from grpocli.training.optim import AdamW
    from grpocli.training.packing import Layout
    from grpocli.training.policy import Policy, Reference
    from grpocli.types import Sampling

ROUNDING = 1e-5
"""Relative tolerance of the entropy threshold: equal tokens of two micro-batches may differ by rounding."""


@dataclass(slots=True)
class Updater:
    """Updates the policy on the rows of a step.

    optimizer: from `Parallel.prepare`. updates: the number since the start of the run. sums: the metrics of this step.
    tokens: the counts of this step. progress: called when a micro-batch begins, without waiting for the GPU.
    """

    world: World
    policy: Policy
    reference: Reference | None
    algorithm: Algorithm
    optim: AdamW
    optimizer: Any
    train: Train
    sampling: Sampling
    total_updates: int
    updates: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    progress: Progress = unreported

    def step(self, rows: Sequence[Row], n_groups: int, step: int = 0) -> dict[str, float]:
        """Train on the rows of step number `step` (from 0), which are the same in every process. Collective.

        Metrics are means over the updates, extremes over all micro-batches; `lr` is that of the last update. The
        learning rate depends on `step`, so that a step with fewer updates, or none, does not shift the schedule.
        """
        self.sums, self.tokens = {}, Counter()
        self.policy.wrapped.train()
        spans = windows(n_groups, self.train.minibatches)
        plans = [self._plan([r for r in rows if r.group in span]) for span in spans]
        for i, plan in enumerate(plans):
            self._score_before(plan, old=i > 0)
        first = step * self.train.updates_per_step
        rate = self.optim.rate(first, self.total_updates)
        of_epoch = sum(len(plan.micro_batches) for plan in plans)
        before = 0
        for epoch in range(self.train.epochs):
            for i, plan in enumerate(plans):
                rate = self.optim.rate(first + epoch * self.train.minibatches + i, self.total_updates)
                self._update(plan, rate, before, self.train.epochs * of_epoch)
                before += len(plan.micro_batches)
        computed = sum(plan.totals.tokens > plan.totals.skipped for plan in plans)
        return self._metrics(self.train.epochs * len(spans), self.train.epochs * computed, rows) | {"lr": rate}

    def gather(self, rows: Sequence[Row]) -> None:
        """Bring the log-probs and entropies of all rows to the main process, in float32 on the CPU. Collective.

        Each process sends its own in one copy from its device, 8 bytes per completion token. Rows that no process has
        computed keep None.
        """
        computed = {i: (row.logp, row.entropy) for i, row in enumerate(rows) if row.logp is not None}
        own = []
        if computed:
            values_2N = torch.stack([torch.cat(list(values)) for values in zip(*computed.values(), strict=True)])
            own = [(list(computed), values_2N.float().cpu())]
        for numbers, values_2N in self.world.gather_to_main(own):
            pieces = values_2N.split([len(rows[i].completion_ids) for i in numbers], dim=1)
            for i, (logp, entropy) in zip(numbers, pieces, strict=True):
                rows[i].logp, rows[i].entropy = logp, entropy

    def _plan(self, rows: list[Row]) -> _Plan:
        """Deal the rows of a window to the processes; all get as many micro-batches as the busiest one."""
        layout = self.policy.layout(self.sampling)
        needed = [row for row in rows if self._matters(row)]
        shares = [layout.pack(share, self.train.micro_batch_tokens) for share in layout.deal(needed, self.world.size)]
        busiest = max(
            1, *(len(share) for share in shares)
        )  # at least one: without a gradient AdamW would skip its decay
        own = shares[self.world.rank]
        totals = Totals.from_lengths(
            torch.tensor([r.advantage for r in rows]),
            torch.tensor([sum(r.mask) for r in rows]),
            torch.tensor([r.group for r in rows]),
            micro_batches=sum(len(share) for share in shares),
        )
        totals = replace(totals, skipped=totals.tokens - sum(sum(r.mask) for r in needed))
        self._count(layout, [micro_batch for share in shares for micro_batch in share])
        self.tokens["tokens/skipped"] += sum(r.n_tokens for r in rows) - sum(r.n_tokens for r in needed)
        return _Plan([*own, *([Row.empty()] for _ in range(busiest - len(own)))], totals.to(self.world.device))

    def _count(self, layout: type[Layout], micro_batches: Sequence[Sequence[Row]]) -> None:
        for rows in micro_batches:
            different = layout.distinct(rows)
            self.tokens["tokens/padding"] += layout.size(rows) - different
            self.tokens["tokens/shared"] += sum(r.n_tokens for r in rows) - different

    def _matters(self, row: Row) -> bool:
        """Whether a row has a gradient, or decides which tokens of other rows have one."""
        if self.algorithm.needs_every_row:
            return True
        return any(row.mask) and (row.advantage != 0 or not self.algorithm.skips)

    def _score_before(self, plan: _Plan, old: bool) -> None:
        """Compute the log-probs and entropies that a window's first update needs.

        They are: log-probs under the reference; entropies, if they select tokens; and log-probs under the policy at the
        start of the step if other windows are updated before this one (`old`). Otherwise the first update's own forward
        gives them, and keeps them for the next epoch.
        """
        entropy = self.algorithm.tokens.needs_entropy
        if self.reference is None and not old and not entropy:
            return
        for i, rows in enumerate(plan.micro_batches):
            self.progress(i, len(plan.micro_batches), "micro-batches", "log-probs before the update")
            batch = MicroBatch.build(rows, self.world.device, self.policy.layout(self.sampling))
            if self.reference:
                _keep(rows, "ref_logp", self.reference.logp(batch, self.sampling))
            if old or entropy:
                logp, entropies = self.policy.logp_without_gradient(batch, self.sampling)
                if old:
                    _keep(rows, "old_logp", logp)
                _keep(rows, "logp", logp)
                _keep(rows, "entropy", entropies)
        if entropy:
            self._select(plan)

    def _select(self, plan: _Plan) -> None:
        """Select the tokens of the policy-gradient term by one threshold over the whole window. Collective."""
        rows = [r for micro_batch in plan.micro_batches for r in micro_batch]
        entropies = torch.cat([r.entropy for r in rows if r.entropy is not None]).cpu()
        mask = torch.tensor([m for r in rows for m in r.mask]).bool()
        window = torch.cat(self.world.gather_objects([entropies[mask]]))
        threshold = self.algorithm.tokens.threshold(window).item() * (1 - ROUNDING)
        for row in rows:
            if row.entropy is not None:
                row.selected = (row.entropy >= threshold).float()

    def _update(self, plan: _Plan, rate: float, before: int, total: int) -> None:
        """One optimizer update. before: how many of the step's `total` micro-batches are done, for the progress."""
        parallel = self.policy.parallel
        for i, rows in enumerate(plan.micro_batches):
            self.progress(before + i, total, "micro-batches")
            last = i + 1 == len(plan.micro_batches)
            with parallel.accumulating(self.policy.wrapped, last):
                self._micro_batch(rows, plan.totals)
        norm = parallel.update(self.policy.wrapped, self.optimizer, rate, self.optim.max_grad_norm)
        self._add({"grad_norm": norm / self.world.size})
        self.updates += 1

    def _micro_batch(self, rows: list[Row], totals: Totals) -> None:
        batch = MicroBatch.build(rows, self.world.device, self.policy.layout(self.sampling))
        logp, entropy = self.policy.logp(batch, self.sampling, self.algorithm.needs_entropy_gradient)
        now = logp.detach()
        old_logp = now if batch.old_logp is None else now.where(batch.old_logp.isnan(), batch.old_logp)
        _keep(rows, "old_logp", now)
        _keep(rows, "logp", now)
        _keep(rows, "entropy", entropy.detach())
        loss, metrics = self.algorithm.loss(
            logp,
            old_logp,
            batch.advantages,
            batch.mask,
            group_ids=batch.group_ids,
            ref_logp=batch.ref_logp,
            rollout_logp=batch.rollout_logp,
            entropy=entropy,
            selected=batch.selected,
            totals=totals,
        )
        self.policy.parallel.backward(self.policy.wrapped, loss)
        metrics["loss"] = loss.detach()
        metrics["entropy"] = (entropy.detach() * batch.mask).sum() / max(totals.tokens - totals.skipped, 1)
        self._add(metrics)

    def _add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = combined(name, self.sums[name], value) if name in self.sums else value

    def _metrics(self, n_updates: int, computed: int, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of the step, with one transfer of sums and one of extremes (docs/metrics.md).

        computed: the number of updates in which a token of the loss was computed.
        """
        self.tokens["tokens/trained"] = sum(sum(r.mask) for r in rows)
        kinds = ("trained", "skipped", "shared", "padding")
        tokens: dict[str, Any] = {f"tokens/{kind}": self.tokens[f"tokens/{kind}"] * self.train.epochs for kind in kinds}
        if not self.sums:
            return tokens
        names = sorted(self.sums.keys() - EXTREMES.keys() - set(() if computed else OF_COMPUTED))
        sums = self.world.sum(torch.stack([self.sums[name].float() for name in names])).tolist()
        counts = [computed if name in OF_COMPUTED else n_updates for name in names]
        means = {name: total / n for name, total, n in zip(names, sums, counts, strict=True)}
        return tokens | means | self._extremes()

    def _extremes(self) -> dict[str, float]:
        """The extremes over all micro-batches of all updates and processes. Collective."""
        signs = {name: sign for name, sign in EXTREMES.items() if name in self.sums}
        if not signs:
            return {}
        largest = self.world.max(torch.stack([sign * self.sums[name].float() for name, sign in signs.items()]))
        return {name: sign * value for (name, sign), value in zip(signs.items(), largest.tolist(), strict=True)}


@dataclass(frozen=True, slots=True)
class _Plan:
    """This process's micro-batches of one window, and the counts of the whole window."""

    micro_batches: list[list[Row]]
    totals: Totals


def _keep(rows: Sequence[Row], name: str, values_BT: Tensor) -> None:
    """Set an attribute of the rows if it is None: values of the sampler or of an earlier update stay."""
    for row, values in zip(rows, values_BT, strict=True):
        if getattr(row, name) is None:
            setattr(row, name, values[: len(row.completion_ids)])
