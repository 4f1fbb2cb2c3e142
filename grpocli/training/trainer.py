"""The training loop and its step: sync, generate and score, advantages, update, log, checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from grpocli.errors import ServiceGone, Stopped
from grpocli.progress import Cancelled
from grpocli.rollout.seeds import seed_of
from grpocli.training import checkpoint
from grpocli.training.accuracy import Evaluator
from grpocli.training.checkpointer import Saver
from grpocli.training.collector import Collector, RolloutBatch, records_of
from grpocli.training.resume_point import prune
from grpocli.training.update import Updater
from grpocli.training.update_checks import UpdateChecks
from grpocli.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.processes.signals import StopSignal
    from grpocli.rollout.engine import Engine
    from grpocli.tracking.recorder import Recorder
    from grpocli.training.policy import Policy, Reference
    from grpocli.training.prefetch import Prefetcher
    from grpocli.types import Group


CLOSE_SECONDS = 2.0
"""Time for a checkpoint that is being written when the user interrupts twice."""


@dataclass(slots=True)
class Trainer:
    """Trains a policy. `train` is the loop, `step` the algorithm as the papers write it."""

    run: Run
    world: World
    policy: Policy
    reference: Reference | None
    tokenizer: Any
    engine: Engine
    collector: Collector
    prefetcher: Prefetcher
    updater: Updater
    check: UpdateChecks
    evaluator: Evaluator
    recorder: Recorder
    saver: Saver
    stop: StopSignal
    state: checkpoint.State
    synced: int = 0
    started: float = field(default_factory=time.monotonic)
    metrics: dict[str, Any] = field(default_factory=dict)

    def train(self) -> dict[str, float]:
        """Train for `train.steps` steps; the final evaluation.

        Raises Stopped, after a checkpoint, on a signal or when the engine or a scoring service is gone.
        """
        try:
            self.before()
            self.repeat_evaluation()
            self.raise_if_stopped()
            while not self.done:
                self.step()
                self.raise_if_stopped()
            return self.after()
        except ServiceGone as gone:
            raise self.stopped_by(gone) from gone
        except Cancelled:
            raise self.stopped() from None

    def step(self) -> None:
        """One step of the algorithm."""
        self.seed_dropout()
        self.world.enter("start", self.state.step + 1)
        self.sync()
        collected = self.collect()
        advantages_PG = self.collector.advantages(collected.groups)
        rows = self.rows(collected.groups, advantages_PG)
        self.update(rows, len(collected.groups))
        try:
            self.evaluate_if_due()
        finally:  # a failed evaluation must not lose the step's metrics
            self.log(collected, advantages_PG, rows)
        if self.due(self.run.checkpoint.every):
            self.checkpoint()

    def seed_dropout(self) -> None:
        """Seed torch by the number of the step, so that dropout repeats after a resume."""
        torch.manual_seed(seed_of(self.run.seed, 2**32 - 2, self.state.step, self.world.rank))

    def sync(self) -> None:
        """Bring the engine to the present weights, unless it has them. Version v is what step v samples with."""
        version = self.state.step + 1
        if self.synced != version:
            with ExitStack() as until_synced:
                with self.timed("rollout"):
                    until_synced.enter_context(self.prefetcher.quiet(version))
                with self.timed("sync"):
                    self.metrics |= self.engine.sync(version)
            self.synced = version

    def sync_again(self) -> None:
        """Bring an engine that was lost, with servers of its own, back to the present weights."""
        version = self.state.step + 1
        self.metrics |= self.engine.sync(version)
        self.synced = version

    def collect(self) -> RolloutBatch:
        """Generate and score completions, until there are the groups that the step wants."""
        self.metrics["weight_version"] = self.synced
        with self.timed("rollout"):
            collected = self.prefetcher.collect(self.synced)
        self.metrics |= collected.metrics
        self.metrics["num_tokens"] = self.state.num_tokens + collected.metrics.get("num_tokens", 0)
        if not self.prefetcher.max_staleness:  # else it is what the trainer has waited
            self.metrics["time/rollout"] -= collected.metrics["time/reward"]
        return collected

    def rows(self, groups: Sequence[Group], advantages_PG: Tensor) -> list[Row]:
        """One row for each completion, with its advantage."""
        algorithm, version = self.run.algorithm, self.synced
        return [
            Row.of(
                rollout,
                advantage * group.prompt.loss_multiplier,
                number,
                algorithm.keep.mask_truncated,
                version,
                algorithm.corrects,
            )
            for number, (group, advantages) in enumerate(zip(groups, advantages_PG.tolist(), strict=True))
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        ]

    def update(self, rows: list[Row], n_groups: int) -> None:
        """Optimizer updates, then the reference's own if it follows the policy."""
        self.saved()
        with self.timed("train"):
            self.metrics |= self.updater.step(rows, n_groups, self.state.step)
            self.updater.gather(rows)
        self.check(self.state.step + 1, self.metrics)
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            updates=self.updater.updates,
            num_tokens=self.metrics["num_tokens"],
        )
        kl = self.run.algorithm.kl
        if self.reference and kl.sync_every and self.state.step % kl.sync_every == 0:
            self.reference.mix(kl.sync_alpha)

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

    def log(self, collected: RolloutBatch, advantages_PG: Tensor, rows: Sequence[Row]) -> None:
        """Write the step's metrics and every completion that was sampled for it, and show them."""
        step, weights = self.state.step, self.collector.weights
        records = records_of(collected, rows, self.run.algorithm, weights, step) if self.world.is_main else []
        self.recorder.step(step, self.metrics, collected.groups, advantages_PG, collected.remarks, records)
        self.metrics = {}

    def checkpoint(self) -> None:
        """Have everything saved that a resume needs. It is there once `saved` returns."""
        self.prefetcher.drain(self.state.step + 1)
        progress = self.prefetcher.progress
        self.state = replace(self.state, draws=progress.draws, seconds=self.seconds)
        contents = checkpoint.Contents(
            self.policy,
            self.updater.optimizer,
            self.tokenizer,
            self.reference if self.run.algorithm.kl.sync_every else None,
            tuple(progress.leftover),
            progress.ready,
        )
        path = self.recorder.run_dir.checkpoint(self.state.step)
        report = self.recorder.progress_of("checkpoint")
        write = partial(checkpoint.save, path, self.state, contents, self.world, report)
        with self.timed("checkpoint"):
            self.saver.start(lambda: self._keep(write))

    def _keep(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, then delete the oldest. Collective."""
        write()
        if self.world.is_main:
            prune(self.recorder.run_dir.checkpoints, self.run.checkpoint.keep)
        self.world.barrier()

    def saved(self) -> None:
        """Wait for the checkpoint that is being written, if one is: what it holds is about to change. Collective."""
        if self.saver.writing:
            with self.timed("checkpoint"):
                self.saver.wait()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent to this step's `time/NAME`, and show what is going on."""
        self.recorder.stage(name)
        self.world.enter(name)
        start = time.perf_counter()
        yield
        self.metrics[f"time/{name}"] = self.metrics.get(f"time/{name}", 0.0) + time.perf_counter() - start

    def close(self) -> None:
        """Stop what this process has started."""
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)  # by a second signal: nobody wants to wait
        with ExitStack() as closing:  # from the last to the first, each whatever the others do
            closing.callback(self.saver.close, CLOSE_SECONDS if interrupted else None)
            closing.callback(self.collector.sampler.scorer.close)
            closing.callback(self.collector.sampler.episodes.close)
            closing.callback(self.engine.close)
            closing.callback(self.prefetcher.close, wait=not interrupted)

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
        self.prefetcher.end(self.state.step + 1)
        self.checkpoint()
        self.saved()
        return Stopped(
            f"{self.stop.received or 'asked to stop'} after step {self.state.step}; "
            f"go on with: grpocli train resume={self.recorder.run_dir.path}"
        )

    def stopped_by(self, gone: ServiceGone) -> Stopped:
        """Checkpoint the last whole step; the error that ends the run. Collective."""
        self.prefetcher.end(self.state.step + 1)
        with suppress(ServiceGone):  # reported already
            self.prefetcher.drain(self.state.step + 1)
        self.checkpoint()
        self.saved()
        return Stopped(
            f"{gone}; stopped after step {self.state.step}, which is saved; when there is a server again, go on with: "
            f"grpocli train resume={self.recorder.run_dir.path}"
        )
