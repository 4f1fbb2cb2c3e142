"""Replaying recorded steps: each is computed again from the state before it, and compared with its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.composition.overrides import to_text
from grpocli.errors import ConfigError, GrpoError
from grpocli.runs.run_dir import step_of
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import steps_by_session
from grpocli_tools.replay.collection import RecordedStep, ReplaySession, RolloutSource
from grpocli_tools.replay.step_replay import Check, StepReplay, checkpoint_check
from grpocli_tools.replay.weights import Weights, checkpoint_before, checkpoint_of

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.progress import Progress
    from grpocli_tools.replay.collection import RecordedStep
    from grpocli_tools.replay.weights import Weights

ENDLESS = 10**9
"""A step that no run reaches, as the end of the last session."""
HARMLESS = ("engine", "sync", "hardware", "tracker", "checkpoint", "eval", "hub", "resume_fallback", "train.steps")
"""Keys that do not change what a step computes. A schedule of the learning rate makes `train.steps` one that does."""

ConfigSpan = tuple[int, int, dict[str, Any]]
"""First and last step of one config, and the values of keys that later resumes have changed."""


@dataclass(slots=True)
class StepReport:
    """The result of one step."""

    step: int
    asked: bool
    """False for a step that only leads to one that was asked for."""
    checks: list[Check]
    origin: str
    """Where the weights come from."""
    exact: bool | None
    """Whether the recomputation is equal to the bit; None if nothing says so."""
    dtype: str

    @property
    def agrees(self) -> bool:
        return not any(check.differ for check in self.checks)


@dataclass
class Replay:
    """Replays steps of a run in order. It writes nothing in the run's folder."""

    saved: SavedRun
    sessions: Sequence[ReplaySession]
    world: World
    progress: Progress
    stage: Callable[[str], None]
    weights: Weights | None = None
    no_weights: str = ""
    """Why there are no weights for the next step."""
    _sources: dict[int, RolloutSource] = field(default_factory=dict)

    @cached_property
    def _metrics(self) -> dict[int, dict[str, Any]]:
        return {int(row["step"]): row for row in self.saved.check().metrics}

    def reports(self, wanted: Sequence[int]) -> Iterator[StepReport]:
        """The reports of the wanted steps, and of those that lead to the first of them."""
        first = self._begin(wanted[0])
        for step in range(first, wanted[-1] + 1):
            if step not in self.saved.rollout_files:
                self._lose(f"the rollout file of step {step} is missing")
                continue
            self._adapt(step)
            if step in wanted or self.weights:
                self.source_of(step)
                self.stage(f"step {step}" + ("" if step in wanted else f", towards step {wanted[0]}"))
                yield self._report(step, step in wanted)

    def recorded(self, step: int) -> RecordedStep:
        """The record of a step. Raises GrpoError if its file is missing or damaged."""
        size = self.session_of(step).run.rollout.group_size
        return RecordedStep.read(self.saved.dir.rollouts(step), step, size, self._metrics.get(step))

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
        return next((one for one in self.sessions if one.first <= step <= one.last), self.sessions[-1])

    def source_of(self, step: int) -> RolloutSource:
        session = self.session_of(step)
        if session.first not in self._sources:
            self.stage("loading the data")
            self._sources[session.first] = RolloutSource.of(session, self.world, self.saved.path)
        return self._sources[session.first]

    def _begin(self, step: int) -> int:
        """Load the newest weights from which the step can be reached; return the first step to train."""
        self._load(checkpoint_before(self.saved.path, step - 1))
        return self.weights.step + 1 if self.weights else step

    def _load(self, path: Path | None) -> None:
        after, first = step_of(path) + 1 if path else 1, self.sessions[0].first
        if after < first:
            return self._lose(f"it needs a checkpoint since step {first - 1}, where a resume replaced the config")
        session = self.session_of(after)
        if path is None and session.no_model:
            return self._lose(f"no checkpoint comes before it, and {session.no_model}")
        self.stage("loading the model")
        try:
            self.weights = Weights.load(session.run, session.job, self.world, path, self.progress)
        except (GrpoError, OSError) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self.weights, self.no_weights = None, why

    def _adapt(self, step: int) -> None:
        """Load the weights before a step from a checkpoint if there are none, or if a resume changed the config."""
        session = self.session_of(step)
        if self.weights and self.weights.run is session.run:
            return
        if path := checkpoint_of(self.saved.path, step - 1):
            self._load(path)
        elif self.weights:
            self._lose(f"a resume changed the config before step {session.first}, whose checkpoint is gone")

    def _report(self, step: int, asked: bool) -> StepReport:
        before, weights = self._metrics.get(step - 1), self.weights
        origin = weights.origin if weights else ""
        replay = StepReplay(self.recorded(step), self.source_of(step), weights, self.no_weights, before)
        checks = replay.checks(asked)
        if weights and (path := checkpoint_of(self.saved.path, step)):
            checks.append(self._compare_with(path, step, weights, bool(replay.exact)))
        return StepReport(step, asked, checks, origin, replay.exact, weights.dtype if weights else "")

    def _compare_with(self, path: Path, step: int, weights: Weights, exact: bool) -> Check:
        """Compare the weights with a checkpoint, and continue from it unless they are equal."""
        try:
            differences = weights.differences_from(path)
        except (GrpoError, OSError) as error:
            return Check("weights after the step", "tensors").skip(f"the checkpoint cannot be read ({error})")
        check = checkpoint_check(step, differences, weights.dtype, exact and weights.adds_alike)
        if check.differ or check.rounded:
            self._load(path)
        return check


def config_spans(saved: SavedRun) -> list[ConfigSpan]:
    """The spans of a run, in order; the last one has the present config."""
    spans: list[ConfigSpan] = []
    earlier: dict[str, Any] = {}
    for part in reversed(steps_by_session(saved.sessions, ENDLESS)):
        if spans and spans[0][2] == earlier:
            spans[0] = part.first, *spans[0][1:]
        else:
            spans.insert(0, (part.first, part.last, dict(earlier)))
        earlier |= {
            key: old
            for key, (old, _) in part.changes.items()
            if not any(f"{key}.".startswith(f"{one}.") for one in HARMLESS)
        }
    return spans or [(1, ENDLESS, {})]


def sessions_of(
    saved: SavedRun, session_of: Callable[[Sequence[str], int, int], ReplaySession]
) -> tuple[list[ReplaySession], str]:
    """The sessions whose config is known, in order, and why that of earlier ones is not; empty if all are.

    session_of: composes the session of these overrides, first and last step.
    """
    found: list[ReplaySession] = []
    for first, last, earlier in reversed(config_spans(saved)):
        try:
            found.insert(0, session_of(_overrides(saved, earlier), first, last))
        except GrpoError as error:
            if not found:
                raise
            return found, f"an earlier session had other values of {', '.join(earlier)} ({error})"
    return found, ""


def _overrides(saved: SavedRun, earlier: Mapping[str, Any]) -> list[str]:
    """Overrides that give keys their earlier values. Raises ConfigError for a part, whose own keys are not recorded."""
    for key, value in earlier.items():
        if isinstance(value, Mapping) or any(one.startswith(f"{key}.") for one in saved.flat):
            raise ConfigError("a resume replaced it, and the keys that it had are not recorded", key=key)
    return [f"{key}={to_text(value)}" for key, value in earlier.items()]
