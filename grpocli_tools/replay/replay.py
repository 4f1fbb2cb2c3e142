"""Replaying recorded steps: each is computed again from the state before it, and compared with its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import GrpoError
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.training.resume_point import step_of
from grpocli_tools.replay.checks import Check
from grpocli_tools.replay.record import RecordedStep
from grpocli_tools.replay.source import ReplaySession, Sources, sources_of
from grpocli_tools.replay.step_replay import StepReplay, checkpoint_check
from grpocli_tools.replay.weights import Weights, checkpoint_before, checkpoint_of, oldest_age

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.progress import Progress


@dataclass(slots=True)
class StepReport:
    """The result of one step.

    asked: False for a step that only leads to one that was asked for. origin: where the weights come from. exact:
    whether the recomputation is equal to the bit; None if nothing says so. notes: sentences.
    """

    step: int
    asked: bool
    checks: list[Check] = field(default_factory=list)
    origin: str = ""
    exact: bool | None = None
    dtype: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not any(check.differ for check in self.checks)


@dataclass(slots=True)
class Replay:
    """Replays steps of a run in order. It writes nothing in the run's folder.

    no_weights: why there are no weights for the next step.
    """

    run_dir: RunDir
    sessions: Sequence[ReplaySession]
    world: World
    progress: Progress
    stage: Any
    weights: Weights | None = None
    no_weights: str = ""
    _sources: dict[int, Sources] = field(default_factory=dict)
    _metrics: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics = {int(row["step"]): row for row in SavedRun(self.run_dir.path).check().metrics}

    def reports(self, wanted: Sequence[int]) -> Iterator[StepReport]:
        """The reports of the wanted steps, and of those that lead to the first of them."""
        asked = set(wanted)
        first = self._begin(wanted[0])
        for step in range(first, wanted[-1] + 1):
            if not self.run_dir.rollouts(step).exists():
                self._lose(f"the rollout file of step {step} is missing")
                continue
            self._adapt(step)
            if step in asked or self.weights:
                self.sources_of(self.session_of(step))
                self.stage(f"step {step}" + ("" if step in asked else f", towards step {wanted[0]}"))
                yield self._report(step, step in asked)

    def weights_before(self, step: int) -> Weights:
        """The weights before a step, trained over the record. Raises GrpoError if there are none."""
        if step > 1 and self.run_dir.rollouts(step - 1).exists():
            for _ in self.reports([step - 1]):
                pass
        if self.weights is None or self.weights.step != step - 1:
            self._begin(step)
        weights = self.weights
        if weights is None or weights.step != step - 1:
            raise GrpoError(f"step {step}: there are no weights before it: {self.no_weights}")
        return weights

    def recorded(self, step: int) -> RecordedStep:
        """The record of a step. Raises GrpoError if its file is missing or damaged."""
        session = self.session_of(step)
        size = session.run.rollout.group_size
        return RecordedStep.read(self.run_dir.rollouts(step), step, size, self._metrics.get(step))

    def last_whole(self, steps: Sequence[int]) -> tuple[int, list[str]]:
        """The last of these steps whose record is whole, and why later ones are left out."""
        why: list[str] = []
        for step in reversed(steps):
            try:
                if self.recorded(step).metrics:
                    return step, why
                why.append(f"step {step} is left out: metrics.jsonl does not have it (yet)")
            except GrpoError as error:
                why.append(f"step {step} is left out: {error}")
        return steps[-1], []

    def session_of(self, step: int) -> ReplaySession:
        """The session that trained a step."""
        return next((one for one in self.sessions if one.first <= step <= one.last), self.sessions[-1])

    def sources_of(self, session: ReplaySession) -> Sources:
        """The source of a session's rollouts."""
        if session.first not in self._sources:
            self.stage("loading the data")
            self._sources[session.first] = sources_of(session, self.world, self.run_dir.path)
        return self._sources[session.first]

    def _begin(self, step: int) -> int:
        """Load the newest weights from which the step can be reached; return the first step to train."""
        session = self.session_of(step)
        wanted = step - 1
        if oldest_age(session.run):
            wanted = max(0, min(step, self.recorded(step).oldest_version) - 1)
        path = checkpoint_before(self.run_dir.path, wanted) or checkpoint_before(self.run_dir.path, step - 1)
        self._load(path)
        return self.weights.step + 1 if self.weights else step

    def _load(self, path: Path | None) -> None:
        after = step_of(path) + 1 if path else 1
        if after < self.sessions[0].first:
            first = self.sessions[0].first
            return self._lose(f"it needs a checkpoint since step {first - 1}, where a resume replaced the config")
        session = self.session_of(after)
        if path is None and session.no_model:
            return self._lose(f"no checkpoint comes before it, and {session.no_model}")
        self.stage("loading the model")
        older = self.weights.older if self.weights else {}
        try:
            self.weights = Weights.load(session.run, session.job, self.world, path, self.progress)
            self.weights.older = older
        except (GrpoError, OSError) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self.weights, self.no_weights = None, why

    def _adapt(self, step: int) -> None:
        """Load the weights before a step from a checkpoint if there are none, or if a resume changed the config."""
        session = self.session_of(step)
        if self.weights and self.weights.run is session.run:
            return
        if path := checkpoint_of(self.run_dir.path, step - 1):
            self._load(path)
        elif self.weights and (weights := self.weights.under(session.run, session.job)):
            self.weights = weights
        elif self.weights:
            self._lose(f"a resume changed the config before step {session.first}, whose checkpoint is gone")

    def _report(self, step: int, asked: bool) -> StepReport:
        recorded, session = self.recorded(step), self.session_of(step)
        report = StepReport(step, asked, origin=self.weights.origin if self.weights else "")
        before = self._metrics.get(step - 1)
        replay = StepReplay(recorded, self.sources_of(session), self.weights, self.no_weights, before, self.progress)
        report.checks = replay.checks(asked)
        report.exact, report.notes = replay.exact, replay.notes
        report.dtype = self.weights.dtype if self.weights else ""
        if self.weights and (path := checkpoint_of(self.run_dir.path, step)):
            self._compare_with(path, report)
        return report

    def _compare_with(self, path: Path, report: StepReport) -> None:
        """Compare the weights with a checkpoint, and continue from it unless they are equal."""
        assert self.weights is not None
        try:
            differences = self.weights.differences_from(path)
        except (GrpoError, OSError, RuntimeError, KeyError) as error:
            check = Check("weights after the step", "tensors")
            check.skip(f"the checkpoint cannot be read ({' '.join(str(error).split())[:200]})")
        else:
            exact = bool(report.exact) and self.weights.adds_alike
            check = checkpoint_check(report.step, differences, self.weights.dtype, exact)
        report.checks.append(check)
        if check.differ or check.rounded:
            self._load(path)
