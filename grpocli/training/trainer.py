"""The training loop and its step: sync, generate and score, advantages, update, evaluate, log, checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from grpocli.errors import ConfigError, RewardError, ServiceGone, Stopped
from grpocli.hardware import peak_memory_gib
from grpocli.processes.reports import START
from grpocli.progress import Cancelled
from grpocli.rollout.sampling import derive_seed
from grpocli.runs.run_dir import resume_command
from grpocli.training.accuracy import Evaluator
from grpocli.training.checkpoint import Checkpointer, State
from grpocli.training.collector import Collector, RolloutBatch, records_of
from grpocli.training.packing import rows_of
from grpocli.training.update import UpdateChecks, Updater, overflow_warning
from grpocli.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.processes.signals import StopSignal
    from grpocli.rollout.engine import Engine
    from grpocli.tracking.recorder import Recorder
    from grpocli.training.policy import Policy
    from grpocli.training.stream import RolloutStream


@dataclass(slots=True)
class Trainer:
    """Trains a policy: `train` is the loop, `step` one step of the papers' algorithm."""

    run: Run
    world: World
    policy: Policy
    tokenizer: Any
    engine: Engine
    collector: Collector
    stream: RolloutStream
    updater: Updater
    update_checks: UpdateChecks
    evaluator: Evaluator
    checkpointer: Checkpointer
    recorder: Recorder
    stop: StopSignal
    state: State
    """The counters that a checkpoint saves."""
    engine_version: int = 0
    """The weight version that the engine has."""
    started: float = field(default_factory=time.monotonic)
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of this step."""
    evaluated: tuple[int, dict[str, float]] | None = None
    """The last evaluation of this session, and the step that it followed."""

    def train(self) -> dict[str, float]:
        """Train for `train.steps` steps, or until `eval.stop_at` is reached, and return the final evaluation.

        Raises Stopped, after a checkpoint, on a signal and when the engine or a scoring service is lost; the error of a
        reward or of the data, after a checkpoint too.
        """
        began = self.state.step
        try:
            self.evaluate_at_start()
            self.raise_if_stopped()
            while self.state.step < self.run.train.steps and not self.ends_early():
                self.step()
                self.raise_if_stopped()
            return self.finish()
        except ServiceGone as gone:
            self.checkpoint_and_stop(gone)
        except (RewardError, ConfigError) as failed:  # the second, of a row of the data, perhaps in one process only
            if self.state.step == began or (self.world.size > 1 and isinstance(failed, ConfigError)):
                raise
            self.save_whole_step()
            resume = resume_command(self.recorder.run_dir.path)
            note = f"step {self.state.step} is saved; when this is mended, resume with: {resume}"
            noted = failed.with_note(note) if isinstance(failed, ConfigError) else RewardError(f"{failed}; {note}")
            raise noted from failed
        except Cancelled:
            self.checkpoint_and_stop()

    def step(self) -> None:
        """One step of the algorithm.

        The old policy π_old is the policy from `sync` to the first optimizer update. It samples this step's rollouts
        (those of a stream are older, see `Row.of`), and it stays π_old in every epoch of `update`.
        """
        self.begin_step()
        if not self.run.algorithm.supervised:  # the engine only samples evaluations
            self.sync()
        batch = self.generate_and_score()
        advantages_PG = self.collector.advantages(batch.groups)
        rows = rows_of(batch.groups, advantages_PG, self.run.algorithm, self.engine_version)
        self.update(rows, len(batch.groups))
        try:
            self.evaluate_if_due()
        finally:  # a failed evaluation must not lose the step's metrics
            self.log(batch, advantages_PG, rows)
        if self.due(self.run.checkpoint.every):
            self.checkpoint()

    def begin_step(self) -> None:
        """Call the callbacks; seed torch by the step's number, so that what a model draws repeats after a resume."""
        self.recorder.callbacks.before_step(self.next_step)
        torch.manual_seed(derive_seed(self.run.seed, 2**32 - 2, self.state.step, self.world.rank))
        self.world.enter(START, self.next_step)

    def sync(self) -> None:
        """Sync the engine unless it has the current weights. Step v samples with weight version v."""
        if self.engine_version == self.next_step:
            return
        with self.timed("rollout") if self.stream.max_staleness else nullcontext():
            self.stream.wait_until_idle(self.sync_now)
        with self.timed("sync"):
            self.sync_now()

    def sync_now(self) -> None:
        """Sync the engine even if it had the current weights, because it may have new servers."""
        self.metrics |= self.engine.sync(self.next_step)
        self.engine_version = self.next_step

    def generate_and_score(self) -> RolloutBatch:
        """The step's groups of scored rollouts, sampled now or, with `rollout.max_staleness`, while others trained."""
        self.metrics["weight_version"] = self.next_step if self.run.algorithm.supervised else self.engine_version
        with self.timed("rollout"):
            batch = self.stream.batch(self.next_step, self.sync_now)
        self.metrics |= batch.metrics
        self.metrics["num_tokens"] = self.state.num_tokens + batch.metrics.get("num_tokens", 0)
        if not self.stream.max_staleness:  # of a stream, time/rollout is only the wait for a batch
            self.metrics["time/rollout"] -= batch.metrics["time/reward"]
        return batch

    def update(self, rows: list[Row], n_groups: int) -> None:
        """Update the policy, then the reference if it follows the policy."""
        self.wait_for_checkpoint()
        step = self.next_step
        with self.timed("train"):
            self.engine.release_memory()
            self.metrics |= self.updater.train_step(rows, n_groups, step)
        self.update_checks(step, self.metrics)
        self.state = replace(
            self.state,
            step=step,
            updates=self.updater.updates,
            num_tokens=self.metrics["num_tokens"],
            evaluation=None,
            scaler=self.policy.parallel.scaler.state_dict(),
        )
        self.updater.move_reference(step)

    def log(self, batch: RolloutBatch, advantages_PG: Tensor, rows: Sequence[Row]) -> None:
        """Write and show the step's metrics; write every completion that was sampled for it."""
        step, weights = self.state.step, self.collector.reward_weights
        records = records_of(batch, rows, self.run.algorithm, weights, step) if self.world.is_main else []
        self.metrics["memory/peak_gib"] = peak_memory_gib(self.world.device)
        warnings = {**batch.warnings, **overflow_warning(self.metrics)}
        self.recorder.step(step, self.metrics, batch.groups, advantages_PG, warnings, records)
        self.metrics = {}

    def checkpoint(self) -> None:
        """Start to save everything that a resume needs. `wait_for_checkpoint` returns when it is saved."""
        self.stream.wait_until_idle(self.sync_now)
        rollouts = self.stream.state(self.next_step)
        self.state = replace(self.state, draws=rollouts.draws, seconds=self.seconds)
        with self.timed("checkpoint"):
            self.checkpointer.save(self.state, rollouts)

    # Evaluation

    def evaluate(self) -> dict[str, float]:
        """Accuracy on held-out problems with the current weights; empty without problems. Collective.

        Weights that this session has evaluated are not evaluated again.
        Raises Cancelled, in every process, when a stop is requested meanwhile.
        """
        if not self.evaluator.prompts:
            return {}
        if self.evaluated is None or self.evaluated[0] != self.state.step:
            if self.evaluator.samples_answers:
                self.sync()
            with self.timed("eval"):
                self.evaluated = self.state.step, self.evaluator()
        return dict(self.evaluated[1])

    def evaluate_at_start(self) -> None:
        """Evaluate before the first step; after a resume, repeat the last step's evaluation if it did not end."""
        if self.state.before is None:
            self.state = replace(self.state, before=self.evaluate())
            self.recorder.evaluated(self.state.step, self.state.before or {})
        if self.state.unevaluated:
            results = self.evaluate()
            self.metrics |= results
            self.recorder.amend(self.state.step, self.metrics)
            self.state, self.metrics = replace(self.state, unevaluated=False, evaluation=results), {}

    def evaluate_if_due(self) -> None:
        """Evaluate every `eval.every` steps. A checkpoint saved before its end records that it is missing."""
        if self.due(self.run.eval.every):
            self.state = replace(self.state, unevaluated=True)
            results = self.evaluate()
            self.metrics |= results
            self.state = replace(self.state, unevaluated=False, evaluation=results)

    def ends_early(self) -> bool:
        """Whether a callback ends the run, or the last evaluation has reached `eval.stop_at`. Collective."""
        may_end = self.run.eval.stop_at.metric is not None or bool(self.run.callbacks)
        reached = self.run.eval.stop_at.reached_by(self.last_evaluation) is not None
        return may_end and self.world.any(reached or bool(self.recorder.callbacks.stop))

    @property
    def last_evaluation(self) -> dict[str, float] | None:
        """The results of the evaluation after the last whole step; None without one."""
        return self.state.evaluation if self.state.step else self.state.before

    def finish(self) -> dict[str, float]:
        """Make the final evaluation and the last checkpoint; return the evaluation."""
        if self.state.step < self.run.train.steps:
            self.recorder.ends_early(self.run.eval.stop_at.reason(self.last_evaluation), self.state.step)
            self.collector.schedule.steps = self.state.step  # no group starts for a later step
        results = self.evaluate()
        if not (self.state.step and self.due(self.run.checkpoint.every)):
            self.checkpoint()
        self.wait_for_checkpoint()
        self.recorder.evaluated(self.state.step, results)
        return results

    # Stopping

    def raise_if_stopped(self) -> None:
        """After a signal to any process, save a checkpoint and raise Stopped. Collective."""
        if self.world.any(self.stop.requested()):
            self.checkpoint_and_stop()

    def checkpoint_and_stop(self, gone: ServiceGone | None = None) -> NoReturn:
        """Save a checkpoint of the last whole step and raise Stopped: of a lost service, or a signal. Collective."""
        step = self.state.step
        self.save_whole_step()
        resume = f"resume with: {resume_command(self.recorder.run_dir.path)}"
        if gone:
            cause, remedy = f"{gone}; stopped after step {step}, which is saved", f"when the service is back, {resume}"
            raise Stopped(cause, remedy=remedy) from gone
        raise Stopped(f"{self.stop.received or 'asked to stop'} after step {step}", remedy=resume)

    def save_whole_step(self) -> None:
        """Save a checkpoint of the last whole step, with the rollouts since its own. Collective."""
        # wait here, so that a lost service cannot prevent the checkpoint; the wait in `checkpoint` then returns at once
        with suppress(ServiceGone):
            self.stream.wait_until_idle(self.sync_now)
        self.checkpoint()
        self.wait_for_checkpoint()

    def close(self) -> None:
        """Stop the threads and processes of this trainer, even if some raise errors."""
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)  # by a second Ctrl-C: close without waiting
        with ExitStack() as closing:  # called in reverse order: the stream first, the checkpointer last
            closing.callback(self.checkpointer.close, wait=not interrupted)
            closing.callback(self.collector.sampler.scorer.close)
            closing.callback(self.collector.sampler.episodes().close)
            closing.callback(self.engine.close)
            closing.callback(self.stream.close, wait=not interrupted)

    # Steps and time

    @property
    def next_step(self) -> int:
        """The number, from 1, of the step after the last whole one. It is also the version of the current weights."""
        return self.state.step + 1

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint being written is saved: the weights it reads are about to change. Collective."""
        with self.timed("checkpoint") if self.checkpointer.writing else nullcontext():
            steps = self.checkpointer.wait()
        for step in steps:
            self.recorder.checkpointed(step)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Show a stage, and add the seconds of the block to this step's `time/STAGE`."""
        self.recorder.stage(stage)
        self.world.enter(stage)
        start = time.perf_counter()
        yield
        self.metrics[f"time/{stage}"] = self.metrics.get(f"time/{stage}", 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Seconds spent on this run, earlier sessions included."""
        return self.recorder.seconds_before + time.monotonic() - self.started

    def due(self, every: int) -> bool:
        """Whether an event that happens every so many steps (0: never) is due now."""
        return every > 0 and self.state.step % every == 0
