"""Recording a run: its files, the live view and trackers. Only the main process records."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpocli.runs.rollouts import Record, reference_answer, write_rollouts
from grpocli.text import prompt_text
from grpocli.tracking.callbacks import Callbacks, StepCompletion
from grpocli.views.view import ShownCompletion, View

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.progress import Progress
    from grpocli.runs.metrics import MetricsLog
    from grpocli.runs.run_dir import RunDir
    from grpocli.tracking.trackers import AccelerateTracker
    from grpocli.types import Group

logger = logging.getLogger(__name__)

MISMATCH_LIMITS = {"float32": 1.02, "float16": 1.02, "bfloat16": 1.1}
"""The `token_mult_prob_error` above which the run warns, by compute dtype.

1.02 is the limit of NeMo RL's GRPO guide. In bfloat16 rounding alone gives 1.05 to 1.07 (docs/vllm.md).
"""

STALE_LIMIT = 1.2
"""The same for completions of older weights: runs above it learned more slowly (docs/evidence/vllm.md)."""

NO_SIGNAL = 3
"""Consecutive steps without a training signal after which the run warns, as the page does."""

STAGES = {
    "sync": "syncing weights",
    "rollout": "sampling and scoring",
    "train": "training",
    "eval": "evaluating",
    "checkpoint": "saving a checkpoint",
    "model": "saving the final model",
}


@dataclass(slots=True)
class Recorder:
    """Records the metrics, rollouts and stages of a run."""

    run_dir: RunDir
    view: View
    metrics: MetricsLog | None
    """None in processes other than the main one."""
    tracker: AccelerateTracker | None
    """None in processes other than the main one."""
    seconds_before: float = 0.0
    """The time of earlier sessions."""
    last: dict[str, Any] = field(default_factory=dict)
    """The metrics of the last step."""
    step_started: float = field(default_factory=time.perf_counter)
    mismatch_expected: bool = False
    """Constrained decoding makes the sampler's log-probs differ."""
    has_teacher: bool = False
    """A teacher trains groups of equal rewards, too."""
    without_signal: int = 0
    """Steps in a row without a training signal."""
    dtype: str = "float32"
    """The compute dtype."""
    shown_warnings: set[str] = field(default_factory=set)
    answer_columns: Sequence[str] = ("answer",)
    """The example columns that may hold the reference answer."""
    current_stage: str = ""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """The user's; none in processes other than the main one."""
    pushes: Any = None
    """The `CheckpointPushes` to the hub; None if the run pushes none."""
    begin: Callable[[], None] = lambda: None
    """Called before a step is recorded."""
    saved: int = 0
    """The step of the last whole checkpoint of this session."""

    def stage(self, name: str) -> None:
        """Begin a stage, a key of STAGES."""
        self.current_stage = name
        self.show_stage()

    def show_stage(self) -> None:
        """Show the current stage, also after something else was shown in its place."""
        self.view.stage(STAGES.get(self.current_stage, self.current_stage or "starting"))

    def progress_of(self, name: str) -> Progress:
        """A callback that shows the progress of a stage while it is the current one; other threads may be ahead."""

        def report(done: float, total: float, unit: str, detail: str = "") -> None:
            if self.current_stage == name:
                self.view.progress(done, total, unit, detail)

        return report

    def step(
        self,
        step: int,
        metrics: dict[str, Any],
        groups: Sequence[Group],
        advantages_PG: Tensor,
        warnings: Mapping[str, str],
        records: Sequence[Record] = (),
    ) -> None:
        """Record and show a step's metrics and rollouts.

        groups, advantages_PG: those trained on. warnings: by kind; each kind is shown once. records: of
        everything that was sampled, for the rollout file.
        """
        now = time.perf_counter()
        metrics["time/step"] = now - self.step_started
        self.step_started = now
        if self.metrics is None:
            return
        self.begin()
        write_rollouts(self.run_dir.rollouts(step), records, step, self.answer_columns)
        self.metrics.append(step, metrics)
        metrics = self.last = self._tracked(step, metrics)
        self.view.step(step, metrics)
        self._warn_of_mismatch(step, metrics)
        self.warn_once({kind: f"step {step}: {text}" for kind, text in warnings.items()})
        if groups:
            self._sample(groups[0], advantages_PG[0].tolist())
        else:
            groups_of = "the groups that algorithm.keep.max_rounds allows"
            self.view.warn(f"step {step} trained on nothing: of {groups_of}, none had completions of different reward")
        self._warn_of_no_signal(step, metrics, bool(advantages_PG.any()) and metrics.get("tokens/trained", 1) > 0)
        self.callbacks.after_evaluation(step, metrics)
        self.callbacks.after_step(step, metrics, _completions(groups, advantages_PG))

    def _tracked(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics without the values of each problem, which only the run's files have; the tracker gets them."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        if self.tracker:
            self.tracker.log(numbers, step)
        return numbers

    def _warn_of_mismatch(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warn once if the log-probs of sampler and trainer differ."""
        error, stale = metrics.get("token_mult_prob_error", 1.0), metrics.get("staleness/max", 0) > 0
        limit = STALE_LIMIT if stale else MISMATCH_LIMITS[self.dtype]
        if error <= limit or self.mismatch_expected:
            return
        cause = "the sampler and the trainer give the same tokens different probabilities"
        remedy = "model.dtype=float32 shows whether it is rounding; algorithm/correction=token_truncate corrects for it"
        if stale:
            cause = "the policy moves far while its completions wait"
            remedy = f"Lower optim.lr, or rollout.max_staleness below {metrics['staleness/max']:.0f}"
        text = f"step {step}: token_mult_prob_error is {error:.3f}, above {limit}: {cause}. {remedy}"
        self.warn_once({"mismatch": text})

    def _warn_of_no_signal(self, step: int, metrics: Mapping[str, Any], has_signal: bool) -> None:
        """Warn once, with the likely cause, if the loss had no token or all advantages were 0 for NO_SIGNAL steps."""
        if self.has_teacher or "reward" not in metrics:
            return
        self.without_signal = 0 if has_signal else self.without_signal + 1
        if self.without_signal < NO_SIGNAL:
            return
        if (cut := metrics.get("completions/clipped_ratio", 0.0)) > 0.9:
            cause = f"{cut:.0%} of the completions are cut off: raise rollout.max_completion_tokens"
        else:
            look = f"look at them with grpocli rollouts {shlex.quote(str(self.run_dir.path))}"
            cause = (
                f"the completions of each group have equal rewards: {look}, and choose another reward, or harder or "
            )
            cause += "easier problems, or raise rollout.group_size"
        text = f"nothing is learned: {NO_SIGNAL} steps in a row have no training signal; {cause}"
        self.warn_once({"no signal": f"step {step}: {text}"})

    def warn_once(self, warnings: Mapping[str, str]) -> None:
        """Show and log the first warning of each kind."""
        for kind, text in warnings.items():
            if kind not in self.shown_warnings:
                self.shown_warnings.add(kind)
                logger.warning("%s", text)
                self.view.warn(text)

    def _sample(self, group: Group, advantages: list[float]) -> None:
        """Show the completion of a group with the highest advantage."""
        best = max(range(len(advantages)), key=advantages.__getitem__)
        rollout = group.rollouts[best]
        answer = reference_answer(rollout.prompt.columns, self.answer_columns)
        episode = rollout.completion.episode
        text = prompt_text(episode.messages) if episode and len(episode.messages) > 1 else rollout.text
        self.view.sample(ShownCompletion(rollout.prompt.text, text, rollout.rewards, advantages[best], answer))

    def amend(self, step: int, results: Mapping[str, float]) -> None:
        """Add the results of an evaluation that a resume repeated to the metrics of its step."""
        if self.metrics is not None:
            self.metrics.amend(step, results)
        self.last |= self._evaluated(step, results)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show and track an evaluation before the first step or after the last."""
        results = self._evaluated(step, results)
        if "eval/accuracy" in results:
            self.view.note(
                f"held-out accuracy after {step} steps: {results['eval/accuracy']:.3f} at temperature 1, "
                f"{results['eval/accuracy_greedy']:.3f} greedy"
            )
        if "eval/loss" in results:
            self.view.note(
                f"held-out answers after {step} steps: loss {results['eval/loss']:.3f} a token, "
                f"{results['eval/token_accuracy']:.3f} of their tokens are the most probable ones"
            )

    def _evaluated(self, step: int, results: Mapping[str, float]) -> dict[str, Any]:
        """Pass on the results of an evaluation, whose time is no step's; empty in processes other than the main one."""
        self.step_started = time.perf_counter()
        if self.metrics is None or not results:
            return {}
        results = self._tracked(step, results)
        self.callbacks.after_evaluation(step, results)
        return results

    def checkpointed(self, step: int) -> None:
        """Pass on that the checkpoint after `step` is whole."""
        self.saved = step
        if self.pushes:
            self.pushes.add(step)
        if self.metrics is not None:
            self.callbacks.after_checkpoint(step, self.run_dir.checkpoint(step))

    def ends_early(self, reached: str, step: int) -> None:
        """Show that the run ends after `step`, why a callback asks for it, and how `eval.stop_at` is reached."""
        self.view.ends_after(step)
        for reason in filter(None, (self.callbacks.stop, reached)):  # callbacks are the main process's
            self.view.note(f"the run ends after step {step}: {reason}")

    def finish_pushes(self, timeout: float) -> None:
        """Wait for the push of a checkpoint, at most `timeout` seconds."""
        if self.pushes:
            self.view.stage("pushing the last checkpoint to the hub")
            self.pushes.close(timeout)

    def close(self) -> None:
        if self.tracker:
            self.tracker.finish()
        self.view.stop()


def _completions(groups: Sequence[Group], advantages_PG: Tensor) -> list[StepCompletion]:
    """The first group's completions for callbacks."""
    return [
        StepCompletion(rollout.prompt.text, rollout.text, dict(rollout.rewards), advantage)
        for group, advantages in zip(groups[:1], advantages_PG[:1].tolist(), strict=True)
        for rollout, advantage in zip(group.rollouts, advantages, strict=False)
    ]
