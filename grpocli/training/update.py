"""The optimizer updates of one step, and the checks after it.

Each update trains on a window of groups: the sum of micro-batch losses over all processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpocli.algorithm.aggregate import Totals
from grpocli.algorithm.metrics import EXTREMES, MEANS_OVER_COMPUTED, OF_THE_GAP, combined
from grpocli.errors import RunError
from grpocli.progress import Progress, unreported
from grpocli.runs.run_dir import resume_word
from grpocli.training.checkpoint import latest
from grpocli.training.packing import MicroBatch, RowBatch, group_spans, padded
from grpocli.training.policy import Reference
from grpocli.training.router_balance import RouterBalance, record_routings, routers
from grpocli.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run, Train
    from grpocli.distributed.world import World
    from grpocli.runs.run_dir import RunDir
    from grpocli.training.optim import Optimizer
    from grpocli.training.policy import Policy
    from grpocli.training.teachers import Teachers
    from grpocli.types import Sampling

SKIPPED, SCALE = "optim/skipped_updates", "optim/loss_scale"
"""Metrics of runs in float16: updates whose gradients overflowed, and the scale of the next loss."""
KINDS = ("trained", "skipped", "shared", "padding")
"""Tokens that are counted."""
OTHER_DTYPE = "set model.dtype=bfloat16, or float32 on a device without it"
ROUNDING = 1e-5
"""Relative tolerance of the entropy threshold: equal tokens of two micro-batches may differ by rounding."""


@dataclass(slots=True)
class Updater:
    """Updates the policy on the rows of a step."""

    world: World
    policy: Policy
    reference: Reference | Teachers | None
    algorithm: Algorithm
    optim_config: Optimizer
    """The keys `optim.*`, with the schedule of the learning rate."""
    optimizer: Any
    """torch's or DeepSpeed's, from `Parallel.prepare`."""
    train: Train
    sampling: Sampling
    total_updates: int
    """Updates in the whole run."""
    updates: int = 0
    """Updates so far."""
    progress: Progress = unreported
    """Called when a micro-batch begins, without waiting for the GPU."""
    routers: RouterBalance = field(init=False)
    """Balances the policy's routers."""
    # set anew in each step
    windows: list[Window] = field(default_factory=list)
    """The step's optimizer windows."""
    built: tuple[RowBatch, MicroBatch] | None = None
    """The last tensors of `_batch`."""
    first_update: int = 0
    """The number of the step's first update."""
    lr: float = 0.0
    """Of the last update."""
    micro_batches_done: int = 0
    parts: list[tuple[list[str], Tensor]] = field(default_factory=list)
    """The loss metrics of each micro-batch, names and values on the device."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Counts for the `tokens/...` metrics."""

    def __post_init__(self) -> None:
        self.routers = RouterBalance(routers(self.policy.model), self.algorithm.router_aux_loss_coef)

    def begin_step(self, rows: Sequence[Row], n_groups: int, step: int) -> list[Window]:
        """The windows of step number `step` (from 1), with the log-probs that their updates need. Collective.

        rows: of all windows, the same in every process. The learning rate depends on `step`, so that a step with fewer
        updates, or none, does not shift the schedule.
        """
        self.parts, self.tokens, self.micro_batches_done = [], Counter(), 0
        self.routers.sums = []
        self.first_update = (step - 1) * self.train.updates_per_step
        self.lr = self.optim_config.rate(self.first_update, self.total_updates)
        self.policy.wrapped.train()
        spans = group_spans(n_groups, self.train.minibatches)
        self.windows = [self._window(i, [r for r in rows if r.group in span]) for i, span in enumerate(spans)]
        for window in self.windows:
            self._score_before_updates(window)
        return self.windows

    @property
    def _row_batches(self) -> list[RowBatch]:
        """This process's micro-batches of the step."""
        return [micro_batch for window in self.windows for micro_batch in window.micro_batches]

    def train_step(self, rows: Sequence[Row], n_groups: int, step: int) -> dict[str, float]:
        """All updates of step number `step`: in each epoch one for each window. Returns its metrics. Collective."""
        windows = self.begin_step(rows, n_groups, step)
        for epoch in range(self.train.epochs):
            for window in windows:
                self.update(window, epoch)
        metrics = self.metrics(rows)
        self.gather(rows)
        return metrics

    def move_reference(self, step: int) -> None:
        """Mix the policy into the reference after step number `step`, if `algorithm.kl.sync_every` says so."""
        kl = self.algorithm.kl
        if kl.sync_every and step % kl.sync_every == 0 and isinstance(self.reference, Reference):
            self.reference.mix(kl.sync_alpha)

    def update(self, window: Window, epoch: int) -> None:
        """One optimizer update on a window, in epoch number `epoch` (from 0) of the step. Collective."""
        self.accumulate(window)
        number = self.first_update + epoch * self.train.minibatches + window.number
        self.lr = self.optim_config.rate(number, self.total_updates)
        limit = self.optim_config.max_grad_norm
        norm = self.policy.parallel.update(self.policy.wrapped, self.optimizer, self.lr, limit)
        found = {"grad_norm": norm}
        if self.policy.parallel.scaler.is_enabled():
            skipped = ~norm.isfinite()
            found = {"grad_norm": norm.where(~skipped, 0.0), SKIPPED: skipped}
        # `metrics` sums over data-parallel ranks
        self._add({name: value / self.world.dp_size for name, value in found.items()})
        self.updates += 1

    def accumulate(self, window: Window) -> None:
        """Add the gradient of a window's loss, without an optimizer update. Collective."""
        parallel = self.policy.parallel
        total = self.train.epochs * sum(len(one.micro_batches) for one in self.windows)
        n = len(window.micro_batches)
        with self.policy.casting_once() if n > 1 else nullcontext():
            for i, micro_batch in enumerate(window.micro_batches, 1):
                self.progress(self.micro_batches_done, total, "micro-batches")
                with parallel.accumulating(self.policy.wrapped, last=i == n):
                    self._micro_batch(micro_batch, window.totals)
                self.micro_batches_done += 1

    def target_loss(self, rows: Sequence[Row]) -> dict[str, Any]:
        """`loss` and `token_accuracy` of rows of targets, one a group, and `loss_by_problem` by group. Collective."""
        window = self._window(0, list(rows))
        tokens = {row.group: sum(row.mask) for row in rows}
        sums_2N = torch.zeros(2, max(tokens) + 1, device=self.world.device)
        for number, some in enumerate(window.micro_batches):
            self.progress(number, len(window.micro_batches), "micro-batches", "loss on held-out answers")
            batch = MicroBatch.build(some.rows, self.world.device, self.policy.layout(self.sampling))
            scores = self.policy.scores_without_gradient(batch, self.sampling)
            sums_2B = torch.stack([-scores.logp.where(batch.mask.bool(), 0.0), scores.top * batch.mask]).sum(2)
            sums_2N.index_add_(1, batch.group_ids.clamp(min=0), sums_2B.to(sums_2N.dtype))  # a row for padding adds 0
        losses, right = self.world.sum_over_dp(sums_2N).tolist()
        total = max(window.totals.tokens, 1)
        return {
            "loss": sum(losses) / total,
            "token_accuracy": sum(right) / total,
            "loss_by_problem": {group: losses[group] / n for group, n in tokens.items() if n},
        }

    def gather(self, rows: Sequence[Row]) -> None:
        """Bring log-probs, entropies, ratios and clipped tokens of all rows to the main process. Collective.

        Each process sends its own in one copy from its device, 8 or 16 bytes per completion token. What no process has
        computed stays None.
        """
        number = {id(row): i for i, row in enumerate(rows)}
        own: list[tuple[list[str], list[int], Any]] = []
        if computed := [one for one in self._row_batches if self._sends and id(one.rows[0]) in number]:
            has_ratios = any("ratio" in one.known for one in computed)
            kinds = ["logp", "entropy", *(["ratio", "clipped"] if has_ratios else [])]
            values_KN = torch.cat([one.tokens(kinds) for one in computed], 1).float().cpu()
            own = [(kinds, [number[id(row)] for one in computed for row in one.rows], values_KN.numpy())]
        self.windows, self.built = [], None  # free the rows' tensors before the next step is sampled
        for kinds, numbers, values_KN in self.world.gather_to_main(own):
            ends = np.cumsum([len(rows[i].completion_ids) for i in numbers])
            for i, values_Kn in zip(numbers, np.split(values_KN, ends[:-1], 1), strict=True):
                for kind, values_n in zip(kinds, values_Kn, strict=True):
                    setattr(rows[i], kind, None if np.isnan(values_n).any() else values_n)
        if any(row.ratio is not None for row in rows):  # others' only update was on-policy
            for row in rows:
                if row.ratio is None and row.logp is not None:
                    row.ratio, row.clipped = np.ones_like(row.logp), np.zeros_like(row.logp)

    @property
    def _sends(self) -> bool:
        """Whether this process sends the values of its rows: of those that share micro-batches, the first one does."""
        return self.world.context_parallel is None or self.world.context_parallel.is_first

    def _window(self, number: int, rows: list[Row]) -> Window:
        """Deal the rows of a window to the processes; all get as many micro-batches as the busiest one.

        Processes that share micro-batches get the same rows.
        """
        layout = self.policy.layout(self.sampling)
        needed = [row for row in rows if self.is_computed(row)]
        dealt = layout.deal(needed, self.world.dp_size)
        shares = [layout.pack(share, self.train.micro_batch_tokens) for share in dealt]
        # at least one micro-batch, because AdamW skips its weight decay without a gradient
        busiest = max(1, *(len(share) for share in shares))
        own = shares[self.world.dp_rank]
        totals = Totals.of(
            torch.tensor([r.advantage for r in rows]),
            torch.tensor([sum(r.mask) for r in rows]),
            torch.tensor([r.group for r in rows]),
            micro_batches=sum(map(len, shares)),
        )
        totals = replace(totals, skipped=totals.tokens - sum(sum(r.mask) for r in needed))
        everyones = [some for share in shares for some in share]
        distinct, n = sum(map(layout.distinct, everyones)), sum(r.n_tokens for r in needed)
        self.tokens["padding"] += sum(map(layout.size, everyones)) - distinct
        self.tokens["shared"] += n - distinct  # prompts that are computed once instead of for each row
        self.tokens["skipped"] += sum(r.n_tokens for r in rows) - n
        own += [[Row.empty()] for _ in range(busiest - len(own))]
        return Window(number, [RowBatch.of(some, self.world.device) for some in own], totals.to(self.world.device))

    def is_computed(self, row: Row) -> bool:
        """Whether a row has a gradient, or decides which tokens of other rows have one."""
        if self.algorithm.depends_on_split:
            return True
        return any(row.mask) and (row.advantage != 0 or not self.algorithm.skips_zero_advantages)

    def _score_before_updates(self, window: Window) -> None:
        """Compute what the first update of a window needs and does not compute itself.

        That is log-probs under the reference; entropies, if they select tokens; and log-probs under the old policy,
        unless it is the sampler. The first update of the first window runs the old policy itself.
        """
        takes_no_ratio = self.algorithm.takes_sampler_as_old or self.algorithm.supervised
        needs_old = window.number > 0 and not takes_no_ratio
        needs_entropy = self.algorithm.tokens.needs_entropy
        if self.reference is None and not needs_old and not needs_entropy:
            return
        for i, micro_batch in enumerate(window.micro_batches):
            self.progress(i, len(window.micro_batches), "micro-batches", "log-probs before the update")
            batch = self._batch(micro_batch)
            if self.reference:
                self.reference.score(micro_batch, batch, self.sampling)
            if needs_old or needs_entropy:
                logp, entropies, _ = self.policy.scores_without_gradient(batch, self.sampling)
                if needs_old:
                    micro_batch.set_missing("old_logp", logp)
                micro_batch.set_missing("logp", logp)
                micro_batch.set_missing("entropy", entropies)
        if needs_entropy:
            self._select_tokens(window)

    def _select_tokens(self, window: Window) -> None:
        """Select the tokens of the policy-gradient term by one threshold over the whole window. Collective."""
        entropies = [
            micro_batch.known["entropy"].cpu()[padded([row.mask for row in micro_batch.rows], np.bool_)]
            for micro_batch in window.micro_batches
        ]
        all_entropies = torch.cat(self.world.gather_objects(entropies if self._sends else []))
        threshold = self.algorithm.tokens.threshold(all_entropies).item() * (1 - ROUNDING)
        for micro_batch in window.micro_batches:
            micro_batch.known["selected"] = (micro_batch.known["entropy"] >= threshold).float()

    def _batch(self, micro_batch: RowBatch) -> MicroBatch:
        """The tensors of a micro-batch. Those of the last one are kept: often it is the only one of a window."""
        if self.built is None or self.built[0] is not micro_batch:
            self.built = None  # frees the last one's
            layout = self.policy.layout(self.sampling)
            self.built = micro_batch, MicroBatch.build(micro_batch.rows, self.world.device, layout)
        return self.built[1]

    def _micro_batch(self, micro_batch: RowBatch, totals: Totals) -> None:
        batch, known = self._batch(micro_batch), micro_batch.known
        had_old_logp = "old_logp" in known
        with record_routings(self.routers.routers) as routings:
            logp, entropy, top = self.policy.scores(batch, self.sampling, self.algorithm.needs_entropy_gradient)
        current_logp = logp.detach()
        # in rows without an update so far the old policy is the current one
        micro_batch.set_missing("old_logp", current_logp)
        at_start = self.micro_batches_done < len(self.windows[0].micro_batches)  # before the step's first update
        if at_start:
            micro_batch.set_missing("logp", current_logp)
            micro_batch.set_missing("entropy", entropy.detach())
        loss, metrics = self.algorithm.loss(
            logp,
            known["old_logp"],
            batch.advantages,
            batch.mask,
            group_ids=batch.group_ids,
            ref_logp=known.get("ref_logp"),
            rollout_logp=None if self.algorithm.supervised else batch.rollout_logp,
            entropy=entropy,
            selected=known.get("selected"),
            totals=totals,
        )
        if (balance := self.routers.loss(routings, batch, totals.rows_in_loss)) is not None:
            loss = loss + balance
        if had_old_logp:  # for the rollout file: the ratio of this update, and which tokens were clipped in an update
            clipped = self.algorithm.clipped(current_logp, known["old_logp"], batch.advantages, batch.mask)
            clipped = clipped.to(logp.dtype)
            known["ratio"] = (current_logp - known["old_logp"]).exp()
            known["clipped"] = known.get("clipped", clipped).maximum(clipped)
        self.policy.parallel.backward(self.policy.wrapped, loss)
        computed = max(totals.tokens - totals.skipped, 1)
        metrics["loss"] = loss.detach()
        metrics["entropy"] = (entropy.detach() * batch.mask).sum() / computed
        if self.algorithm.supervised:
            metrics["token_accuracy"] = (top * batch.mask).sum() / computed
            del metrics["approx_entropy"]  # of targets it is their cross-entropy
        if self.algorithm.takes_sampler_as_old and not at_start:
            # after the first update the policy is not the one that sampled, so the gap is more than rounding
            metrics = {name: value for name, value in metrics.items() if name not in OF_THE_GAP}
        self._add(metrics)

    def _add(self, metrics: dict[str, Tensor]) -> None:
        self.parts.append((list(metrics), torch.stack([value.float() for value in metrics.values()])))

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of the step, with one transfer from the device (docs/metrics.md). Collective.

        Metrics are means over the updates, extremes over all micro-batches; `lr` is that of the last update.
        """
        epochs, n_updates = self.train.epochs, self.train.epochs * len(self.windows)
        # updates in which a token of the loss was computed
        has_computed = [one.totals.tokens > one.totals.skipped for one in self.windows]
        counts = dict.fromkeys(MEANS_OVER_COMPUTED, epochs * sum(has_computed))
        if self.algorithm.takes_sampler_as_old:  # `_micro_batch` measures the gap in the first update only
            counts |= dict.fromkeys(OF_THE_GAP, int(any(has_computed[:1])))
        self.tokens["trained"] = sum(sum(r.mask) for r in rows)
        metrics: dict[str, Any] = {f"tokens/{kind}": self.tokens[kind] * epochs for kind in KINDS} | {"lr": self.lr}
        if not self.parts:
            return metrics
        found = self.sums()
        names = sorted(found.keys() - EXTREMES.keys() - {name for name, n in counts.items() if not n})
        sums = self.world.sum_over_dp(torch.tensor([found[name] for name in names], device=self.world.device)).tolist()
        totals = dict(zip(names, sums, strict=True))
        scaler, skipped = self.policy.parallel.scaler, round(totals.pop(SKIPPED, 0))
        counts["grad_norm"] = n_updates - skipped
        metrics |= {name: total / n for name, total in totals.items() if (n := counts.get(name, n_updates))}
        if scaler.is_enabled():
            metrics |= {SKIPPED: skipped, SCALE: scaler.get_scale()}
        signs = {name: sign for name, sign in EXTREMES.items() if name in found}
        signed = torch.tensor([sign * found[name] for name, sign in signs.items()], device=self.world.device)
        largest = self.world.max(signed).tolist() if signs else []
        metrics |= {name: sign * value for (name, sign), value in zip(signs.items(), largest, strict=True)}
        return metrics | self.routers.metrics(self.world)

    def sums(self) -> dict[str, float]:
        """The metrics of this process's micro-batches so far together."""
        sums: dict[str, float] = {}
        names = [name for names, _ in self.parts for name in names]
        for name, value in zip(names, torch.cat([values for _, values in self.parts]).tolist(), strict=True):
            sums[name] = combined(name, sums[name], value) if name in sums else value
        return sums


@dataclass(frozen=True, slots=True)
class Window:
    """The groups of one optimizer update."""

    number: int
    """In the epoch, from 0."""
    micro_batches: list[RowBatch]
    """This process's."""
    totals: Totals
    """The counts of all processes' rows."""


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
        self.check_loss(step, metrics)
        self.check_sampler(step, metrics)
        self.check_weights(step)

    def check_loss(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get(SCALE, 1.0) < 1:
            raise RunError(
                f"step {step}: gradients overflow float16 even without a scale of the loss: {OTHER_DTYPE}. If the "
                f"weights have diverged, {self._remedy(step)}"
            )
        for name in ("loss", "grad_norm"):
            value = metrics.get(name, 0.0)
            if not math.isfinite(value) and not metrics.get(SKIPPED):
                raise RunError(f"step {step}: {name} is {value}; {self._remedy(step)}")

    def check_sampler(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the engine's log-probs with the policy's, unless they differ in any case."""
        rollout, error = self.run.rollout, metrics.get("token_mult_prob_error", 1.0)
        off_policy = metrics.get("staleness/max", 0) > 0 or metrics.get("sampling/carried", 0) > 0
        overflowed = math.isnan(error) and bool(metrics.get(SKIPPED))  # in the trainer's forward
        bound = None if rollout.sampling.structure or off_policy or overflowed else rollout.max_prob_error
        if bound is not None and not error <= bound:
            raise RunError(
                f"step {step}: token_mult_prob_error is {error:.4g}, above rollout.max_prob_error={bound:g}: the "
                "engine's log-probs are not those of the trainer's weights; the step is not saved"
            )

    def check_weights(self, step: int) -> None:
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
        """What the user can do. began_finite: whether the weights before the update were finite."""
        change = f"lower optim.lr={self.run.optim.lr}, or set optim.max_grad_norm"
        last = latest(self.run_dir.checkpoints)
        if last is None:
            return f"{change}, and begin again: there is no checkpoint yet"
        if last == self.run_dir.checkpoint(step - 1) and not began_finite:
            return f"{change}, and remove {last}: it holds the weights that this step began with"
        return f"{change}, and go on from the last checkpoint with {resume_word(self.run_dir.path)}"
