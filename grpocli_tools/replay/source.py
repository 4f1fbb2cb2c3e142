"""Where a replay gets prompts, rewards and environments from, and which of them are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.environments.environment import loaded_environment_of
from grpocli.errors import ConfigError, GrpoError
from grpocli.models.loading import configured_end_ids, end_token_ids, load_tokenizer
from grpocli.rewards.scorer import Scorer
from grpocli.tasks.prompt_source import PromptSource, rewards_for
from grpocli.tasks.task import tasks_of
from grpocli.training.resume_point import checkpoints
from grpocli_tools.replay.collection import RolloutSource

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineJob


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """Consecutive steps that one config has trained.

    run: that config. job: how its model is loaded. no_model: why the initial model is not available; empty if it is.
    """

    first: int
    last: int
    run: Run
    job: EngineJob
    no_model: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """The source of a session's rollouts. no_prompts: why prompts are not drawn again. skipped: {reward: why it is not
    called again}. unscored: the same source, without rewards.
    """

    source: RolloutSource
    no_prompts: str = ""
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def unscored(self) -> RolloutSource:
        return replace(self.source, scorer=replace(self.source.scorer, rewards={}))


def sources_of(session: ReplaySession, world: World, run_dir: Path) -> Sources:
    """The source of a session. Raises ConfigError if there is no tokenizer."""
    run = session.run
    tokenizer, folder = _tokenizer(session, run_dir)
    data, no_prompts = None, ""
    try:
        data = PromptSource.of(run, tokenizer)
    except (GrpoError, OSError) as error:
        no_prompts = f"the data cannot be read again ({error})"
    tasks = tasks_of(run.task)
    columns = (
        {name: column for task in data.tasks for name in task.rewards for column in [task.columns]} if data else {}
    )
    skipped = dict(_skipped(run, columns))
    scorer = Scorer(
        {name: reward for name, reward in run.reward.items() if name not in skipped},
        run.rollout.max_reward_errors,
        data.rewards if data else {name: rewards_for(task, run.reward) for name, task in tasks.items()},
    )
    environments = {name: found for name, task in tasks.items() if (found := loaded_environment_of(task))}
    redraw = data.redraw if data else None
    source = RolloutSource(run, world, tokenizer, scorer, environments, redraw, _end_ids(run, folder, tokenizer))
    return Sources(source, no_prompts, skipped)


def _tokenizer(session: ReplaySession, run_dir: Path) -> tuple[Any, str]:
    """The tokenizer, from the initial model, a checkpoint or the final model, and that folder."""
    saved = [path for path in [*reversed(checkpoints(run_dir / "checkpoints")), run_dir / "model"] if path.is_dir()]
    folders = [*([] if session.no_model else [session.job.model_path]), *map(str, saved)]
    if not folders:
        raise ConfigError(f"there is no tokenizer: {session.no_model}", key="RUN", value=run_dir)
    return load_tokenizer(session.run.model, folders[0]), folders[0]


def _end_ids(run: Run, folder: str, tokenizer: Any) -> frozenset[int]:
    """The tokens at which the engines of grpocli end a completion; empty for an engine of the user."""
    if not type(run.engine.resolved()).__module__.startswith("grpocli."):
        return frozenset()
    return end_token_ids(configured_end_ids(run.model, folder), tokenizer)


def _skipped(run: Run, columns: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """(name, why) of each reward that is not called again. columns: of the task that each reward scores, if known."""
    for name, reward in run.reward.items():
        if not getattr(reward, "repeatable", True):
            yield name, "it asks a service"
            continue
        try:
            if check_ready := getattr(reward, "check_ready", None):
                check_ready()
            if name in columns:
                reward.check(columns[name])
        except (GrpoError, OSError) as error:
            yield name, f"it cannot be called ({error})"
