"""Replaying recorded steps: each is computed again from the state before it, and compared with its record."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.composition.overrides import to_text
from grpocli.errors import ConfigError, GrpoError, RewardError
from grpocli.rewards.scorer import Scorer
from grpocli.runs.run_dir import step_of
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import steps_by_session
from grpocli.tasks.prompt_source import accuracy_rewards_of, rewards_for
from grpocli.training.collector import advantages_of, lengths_of, rewards_of
from grpocli.training.packing import rows_of
from grpocli.types import Group
from grpocli_tools.replay.collection import RecordedStep, ReplaySession, RolloutSource, collect_again
from grpocli_tools.replay.step_replay import Check, StepReplay, checkpoint_check
from grpocli_tools.replay.weights import Weights, checkpoint_before, checkpoint_of

if TYPE_CHECKING:
    from torch import Tensor

    from grpocli.algorithm import Algorithm
    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.progress import Progress
    from grpocli.types import Row
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

    def weights_before(self, step: int) -> Weights:
        """The weights before a step, trained over the record. Raises GrpoError if there are none."""
        if step > 1 and step - 1 in self.saved.rollout_files:
            for _ in self.reports([step - 1]):
                pass
        if self.weights is None or self.weights.step != step - 1:
            self._begin(step)
        if self.weights is None or self.weights.step != step - 1:
            raise GrpoError(f"step {step}: there are no weights before it: {self.no_weights}")
        return self.weights

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


SHOWN = 5
"""Completions shown on which two rewards disagree most."""
LONGEST = 80
"""Characters shown of a completion."""


def columns_of(recorded: RecordedStep) -> list[str]:
    """The columns that some example of a step has."""
    return list(dict.fromkeys(name for group in recorded.groups for name in group.prompt().columns))


def recorded_groups(replay: Replay, step: int) -> list[Group]:
    return collect_again(replay.source_of(step), replay.recorded(step)).groups


def other_reward(groups: Sequence[Group], run: Run, step: int, rewards: Mapping[str, Any]) -> dict[str, object]:
    """What other rewards say about a step's completions, beside the run's weighted sum.

    Raises RewardError if they cannot score any of them.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored, stats = Scorer(dict(rewards), 1.0).score(rollouts, run.rollout.max_completion_tokens)
    error = next((one.first_error for one in stats.rewards.values() if one.first_error), "")
    new_PG = torch.tensor([[r.rewards[name] for r in scored] for name in rewards], dtype=torch.float64)
    if error and new_PG.isnan().all():
        raise RewardError(f"step {step}: {', '.join(rewards)} cannot score any completion; the first error: {error}")
    weights = torch.tensor([[reward.weight] for reward in rewards.values()], dtype=torch.float64)
    other_PG = (new_PG * weights).nansum(0).masked_fill(new_PG.isnan().all(0), math.nan).reshape(len(groups), -1)
    own = {name: reward.weight for name, reward in run.reward.items()}
    recorded = rewards_of(groups, list(own))
    mine_PG = run.algorithm.scores(recorded, own)
    known = ~(mine_PG.isnan() | other_PG.isnan())
    mine, other = mine_PG[known], other_PG[known]
    constant = [(scores == scores[:, :1]).all(1) for scores in (mine_PG, other_PG)]
    advantage = run.algorithm.advantage
    if run.algorithm.needs_lengths:
        advantage = functools.partial(advantage, lengths_PG=lengths_of(groups, run.algorithm))
    return {
        "rewards": list(rewards),
        "mean": {
            **{name: float(values.nanmean()) for name, values in recorded.items()},
            **{f"{name} (other)": float(values.nanmean()) for name, values in zip(rewards, new_PG, strict=True)},
        },
        "not scored": int(other_PG.isnan().sum()),
        **({"first error": error} if error else {}),
        "equal": int((mine == other).sum()),
        "higher": int((other > mine).sum()),
        "lower": int((other < mine).sum()),
        "correlation of advantages": _correlation(*(advantage(scores)[known] for scores in (mine_PG, other_PG))),
        "groups that become informative": int((constant[0] & ~constant[1]).sum()),
        "groups that become uninformative": int((~constant[0] & constant[1]).sum()),
        "largest disagreements": _largest(groups, mine_PG, other_PG),
    }


def _largest(groups: Sequence[Group], mine_PG: Tensor, other_PG: Tensor) -> list[dict[str, object]]:
    gap_N = (mine_PG - other_PG).abs().nan_to_num().flatten()
    found: list[dict[str, object]] = []
    for place in gap_N.argsort(descending=True, stable=True)[:SHOWN].tolist():
        p, g = divmod(place, mine_PG.shape[1])
        if gap_N[place] > 0:
            values = {"recorded": float(mine_PG[p, g]), "other": float(other_PG[p, g])}
            text = groups[p].rollouts[g].text[:LONGEST]
            found.append({"group": p, "completion": g, "uid": groups[p].uid, **values, "text": text})
    return found


def _correlation(one: Tensor, other: Tensor) -> float | None:
    """Pearson's; None if one of them is constant."""
    if len(one) < 2 or not (one.std() > 0 and other.std() > 0):
        return None
    return float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])


def other_algorithm(groups: Sequence[Group], run: Run, step: int, weights: Weights, other: Run) -> dict[str, object]:
    """Advantages, loss and gradient of another run's algorithm beside the run's, on the same groups and weights.

    groups: those that the step trained on, with the recorded rewards; those that the other algorithm adds are scored.
    Both have one backward in one window, and no update.
    """
    added, left_out = _with_added_rewards(groups, run, other)
    found: dict[str, dict[str, Any]] = {}
    advantages, gradients = [], []
    for name, config, trained in (("run", run, groups), ("other", other, added)):
        one = config.algorithm
        own = {key: reward.weight for key, reward in config.reward.items() if key not in left_out}
        accuracy = [accuracy_rewards_of(config)[group.prompt.task] for group in trained]
        advantages_PG = advantages_of(trained, one, own, accuracy)
        rows = rows_of(trained, advantages_PG, one, step)
        found[name], gradient = weights.gradient(config, rows, len(trained), step)
        found[name] |= {
            "rewards": ", ".join(f"{key} x {weight:g}" for key, weight in own.items()),
            "groups that its keep part keeps": float(one.kept(rewards_of(trained, list(own)), own, accuracy).sum()),
            "mean |advantage|": float(advantages_PG.abs().mean()),
            "share of tokens with a gradient": _share(one, rows),
        }
        advantages.append(advantages_PG.flatten())
        gradients.append(gradient)
    return {
        **found,
        **({"rewards of the other algorithm that are left out": left_out} if left_out else {}),
        "correlation of advantages": _correlation(*advantages),
        "cosine of the gradients": float(torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0)),
    }


def _with_added_rewards(groups: Sequence[Group], run: Run, other: Run) -> tuple[Sequence[Group], dict[str, str]]:
    """The groups with the scores of rewards that only the other run has, and {reward: why it is left out}."""
    added, left_out = {}, {}
    columns = list(dict.fromkeys(name for group in groups for name in group.prompt.columns))
    for name in [name for name in other.reward if name not in run.reward]:
        try:
            other.reward[name].check(columns)
            added[name] = other.reward[name]
        except GrpoError as error:
            left_out[name] = str(error)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    known = [name for name, reward in run.reward.items() if not reward.sees_group]
    tasks = {name: [*rewards_for(task, run.reward), *added] for name, task in run.tasks.items()}
    scored, _ = Scorer(added, 1.0, tasks).score(rollouts, run.rollout.max_completion_tokens, known=known)
    scores = iter(scored)
    return [
        Group(group.prompt, [replace(r, rewards=r.rewards | next(scores).rewards) for r in group.rollouts])
        for group in groups
    ], left_out


def _share(algorithm: Algorithm, rows: Sequence[Row]) -> float:
    """The share of the model's tokens whose loss has a gradient."""
    counted = [sum(row.mask) * (row.advantage != 0 or not algorithm.zero_at_zero_advantage) for row in rows]
    return sum(counted) / max(1, sum(len(row.completion_ids) for row in rows))
