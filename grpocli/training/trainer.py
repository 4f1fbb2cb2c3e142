"""A trainer process: the live pieces of a run, and what they are made from."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import RunError, ServiceGone, Stopped
from grpocli.training import checkpoint
from grpocli.training.async_checkpoint import Saver
from grpocli.training.collect import Collected, Collector
from grpocli.training.evaluate import Evaluator
from grpocli.training.records import records_of
from grpocli.training.row import Row
from grpocli.training.update import Updater

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.processes.signals import StopSignal
    from grpocli.rollout.engine import Engine
    from grpocli.tracking.recorder import Recorder
    from grpocli.training.policy import Policy
    from grpocli.training.prefetch import Ahead
    from grpocli.training.reference import Reference


PATIENCE = 2.0
"""Seconds for the checkpoint that is being written when somebody wants everything to end at once."""


@dataclass(slots=True)
class Trainer:
    """The verbs of a step. See `grpocli.training.step` for the order they are used in."""

    run: Run
    world: World
    policy: Policy
    reference: Reference | None
    tokenizer: Any
    engine: Engine
    collector: Collector
    ahead: Ahead
    updater: Updater
    evaluator: Evaluator
    recorder: Recorder
    saver: Saver
    stop: StopSignal
    state: checkpoint.State
    synced: int = 0
    started: float = field(default_factory=time.monotonic)
    metrics: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent to this step's `time/NAME`, and show what is going on."""
        self.recorder.stage(name)
        self.world.enter(name)
        start = time.perf_counter()
        yield
        self.metrics[f"time/{name}"] = self.metrics.get(f"time/{name}", 0.0) + time.perf_counter() - start

    def sync(self) -> None:
        """Bring the engine to the present weights, unless it has them. Version v is what step v samples with."""
        version = self.state.step + 1
        if self.synced != version:
            with ExitStack() as until_synced:
                with self.timed("rollout"):
                    until_synced.enter_context(self.ahead.quiet(version))
                with self.timed("sync"):
                    self.metrics |= self.engine.sync(version)
            self.synced = version

    def sync_again(self) -> None:
        """Bring an engine that was lost, with servers of its own, back to the present weights."""
        version = self.state.step + 1
        self.metrics |= self.engine.sync(version)
        self.synced = version

    def collect(self) -> Collected:
        """Prompts to scored groups with advantages."""
        self.metrics["weight_version"] = self.synced
        with self.timed("rollout"):
            collected = self.ahead.collect(self.synced)
        self.metrics |= collected.metrics
        self.metrics["num_tokens"] = self.state.num_tokens + collected.metrics.get("num_tokens", 0)
        if not self.ahead.max_staleness:  # else it is what the trainer has waited
            self.metrics["time/rollout"] -= collected.metrics["time/reward"]
        return collected

    def credit(self, collected: Collected) -> list[Row]:
        """One row for each completion, with its advantage."""
        algorithm = self.run.algorithm
        return [
            Row.of(
                rollout,
                advantage * group.prompt.loss_multiplier,
                index,
                algorithm.keep.mask_truncated,
                self.synced,
                algorithm.corrects,
            )
            for index, (group, advantages) in enumerate(
                zip(collected.groups, collected.advantages.tolist(), strict=True)
            )
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        ]

    def update(self, rows: list[Row], n_groups: int) -> None:
        """Optimizer updates, then the reference's own if it follows the policy."""
        self.saved()
        with self.timed("train"):
            self.metrics |= self.updater.step(rows, n_groups, self.state.step)
            self.updater.gather(rows)
        self._refuse_nan()
        self._refuse_mismatch()
        self._refuse_broken_weights()
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            updates=self.updater.updates,
            num_tokens=self.metrics["num_tokens"],
        )
        kl = self.run.algorithm.kl
        if self.reference and kl.sync_every and self.state.step % kl.sync_every == 0:
            self.reference.mix(kl.sync_alpha)

    def _refuse_nan(self) -> None:
        """Stop before weights that are no numbers reach a checkpoint."""
        for name in ("loss", "grad_norm"):
            value = self.metrics.get(name, 0.0)
            if not math.isfinite(value):
                raise RunError(f"step {self.state.step + 1}: {name} is {value}; {self._remedy()}")

    def _remedy(self, began_finite: bool = False) -> str:
        """What to do after a failed update.

        began_finite: the weights before it were good; else a resume from a checkpoint of them would fail again.
        """
        change = f"lower optim.lr={self.run.optim.lr}, or set optim.max_grad_norm"
        last = checkpoint.latest(self.recorder.run_dir.checkpoints)
        if last is None:
            return f"{change}, and begin again: there is no checkpoint yet"
        if last == self._checkpoint_path and not began_finite:
            return f"{change}, and remove {last}: it holds the weights that this step began with"
        return f"{change}, and go on from the last checkpoint with resume={self.recorder.run_dir.path}"

    def _refuse_broken_weights(self) -> None:
        """Stop after an update that made weights infinite or NaN, before anybody samples with them. Collective.

        The loss would show it in the next step, if there is one.
        """
        tensors = (getattr(p, "ds_tensor", p.detach()) for p in self.policy.model.parameters() if p.requires_grad)
        shards = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        largest = [torch.linalg.vector_norm(shard, torch.inf) for shard in shards if shard.numel()]
        finite = not largest or bool(torch.stack(largest).isfinite().all())
        if self.world.any(not finite):
            remedy = self._remedy(began_finite=True)
            raise RunError(f"step {self.state.step + 1}: its update left weights that are not finite; {remedy}")

    def _refuse_mismatch(self) -> None:
        """Stop before the checkpoint where log-probs show that the engine's tokens or weights are not what it reports.

        Skipped for constrained decoding and older weights, whose probabilities differ as they should.
        """
        rollout, error = self.run.rollout, self.metrics.get("token_mult_prob_error", 1.0)
        off_policy = self.metrics.get("staleness/max", 0) > 0 or self.metrics.get("sampling/carried", 0) > 0
        bound = None if rollout.sampling.structure or off_policy else rollout.max_prob_error
        if bound is not None and not error <= bound:
            raise RunError(
                f"step {self.state.step + 1}: token_mult_prob_error is {error:.4g}, above rollout.max_prob_error="
                f"{bound:g}: the engine samples other tokens than it says, or with other weights than the trainer's; "
                "the step is not saved"
            )

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy under the present weights; empty where there are no problems.

        Collective. Raises Cancelled, in every process, where a stop is asked for before it ends.
        """
        if not self.evaluator.prompts:
            return {}
        self.sync()
        with self.timed("eval"):
            return self.evaluator()

    def before(self) -> None:
        """The evaluation before the first step, kept for the summary; a resumed run has it already."""
        if self.state.before is None:
            self.state = replace(self.state, before=self.evaluate())
            self.recorder.evaluated(self.state.step, self.state.before or {})

    def evaluate_if_due(self) -> None:
        """Evaluate after a step, where that is due; until it ends, checkpoints say that it is missing."""
        if self.due(self.run.eval.every):
            self.state = replace(self.state, unevaluated=True)
            self.metrics |= self.evaluate()
            self.state = replace(self.state, unevaluated=False)

    def repeat_evaluation(self) -> None:
        """After a resume, an evaluation of the last step that did not end, added to the metrics of that step."""
        if self.state.unevaluated:
            self.metrics |= self.evaluate()
            self.recorder.amend(self.state.step, self.metrics)
            self.state, self.metrics = replace(self.state, unevaluated=False), {}

    def after(self) -> dict[str, float]:
        """Evaluate and save what the run leaves behind."""
        results = self.evaluate()
        if not self.due(self.run.checkpoint.every):
            self.checkpoint()
        self.saved()
        self.recorder.evaluated(self.state.step, results)
        return results

    def log(self, collected: Collected, rows: Sequence[Row]) -> None:
        """Write the step's metrics and every completion that was sampled for it, and show them."""
        step, weights = self.state.step, self.collector.weights
        records = records_of(collected, rows, self.run.algorithm, weights, step) if self.world.is_main else []
        self.recorder.step(step, self.metrics, collected, records)
        self.metrics = {}

    def checkpoint(self) -> None:
        """Have everything saved that a resume needs. It is there once `saved` returns."""
        self.ahead.drain(self.state.step + 1)
        progress = self.ahead.progress
        self.state = replace(self.state, draws=progress.draws, seconds=self.seconds)
        contents = checkpoint.Contents(
            self.policy,
            self.updater.optimizer,
            self.tokenizer,
            self.reference if self.run.algorithm.kl.sync_every else None,
            tuple(progress.carried),
            progress.ready,
        )
        report = self.recorder.progress_of("checkpoint")
        write = partial(checkpoint.save, self._checkpoint_path, self.state, contents, self.world, report)
        with self.timed("checkpoint"):
            self.saver.start(lambda: self._keep(write))

    @property
    def _checkpoint_path(self) -> Path:
        """Path of a checkpoint of the current weights."""
        return self.recorder.run_dir.checkpoints / f"step_{self.state.step:06d}"

    def _keep(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, then delete the oldest. Collective."""
        write()
        if self.world.is_main:
            checkpoint.prune(self.recorder.run_dir.checkpoints, self.run.checkpoint.keep)
        self.world.barrier()

    def saved(self) -> None:
        """Wait for the checkpoint that is being written, if one is: what it holds is about to change. Collective."""
        if self.saver.writing:
            with self.timed("checkpoint"):
                self.saver.wait()

    def close(self) -> None:
        """Stop what this process has started."""
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)  # by a second signal: nobody wants to wait
        with ExitStack() as closing:  # from the last to the first, each whatever the others do
            closing.callback(self.saver.close, PATIENCE if interrupted else None)
            closing.callback(self.collector.sampler.scorer.close)
            closing.callback(self.collector.sampler.episodes.close)
            closing.callback(self.engine.close)
            closing.callback(self.ahead.close, wait=not interrupted)

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier sessions included."""
        return self.recorder.seconds_before + max(0.0, time.monotonic() - self.started)  # a reward may fake the clock

    @property
    def done(self) -> bool:
        return self.state.step >= self.run.train.steps

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps (0: never) is due now."""
        return every > 0 and self.state.step % every == 0

    def raise_if_stopped(self) -> None:
        """After a signal to any process: checkpoint, then raise Stopped. Collective."""
        if self.world.any(self.stop.asked()):
            raise self.stopped()

    def stopped(self) -> Stopped:
        """Checkpoint after a whole step, or before the first; the error that ends the run. Collective."""
        self.ahead.end(self.state.step + 1)
        self.checkpoint()
        self.saved()
        return Stopped(
            f"{self.stop.received or 'asked to stop'} after step {self.state.step}; "
            f"go on with: grpocli train resume={self.recorder.run_dir.path}"
        )

    def stopped_by(self, gone: ServiceGone) -> Stopped:
        """Checkpoint the last whole step; the error that ends the run. Collective."""
        self.ahead.end(self.state.step + 1)
        with suppress(ServiceGone):  # reported already
            self.ahead.drain(self.state.step + 1)
        self.checkpoint()
        self.saved()
        return Stopped(
            f"{gone}; stopped after step {self.state.step}, which is saved; when there is a server again, go on with: "
            f"grpocli train resume={self.recorder.run_dir.path}"
        )


def torch_seed(seed: int, step: int, rank: int) -> None:
    """Seed what little randomness is left in the model (dropout) from counters, so that a resume repeats it."""
    from grpocli.rollout.seeds import seed_of

    torch.manual_seed(seed_of(seed, 2**32 - 2, step, rank))
