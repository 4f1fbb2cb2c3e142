"""Evaluating models: each checkpoint's completions of every task's held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpocli.environments.environment import environment_of
from grpocli.progress import Watch
from grpocli.rewards.scorer import Scorer
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.tasks.mixture import about, key_of, limits_of, tasks_of
from grpocli.tasks.prompt_source import accuracy_reward_of
from grpocli.tasks.prompts import PromptSet
from grpocli.tasks.task import columns_of
from grpocli.training.accuracy import AccuracyRewards, TaskResult, task_result
from grpocli.types import Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.training.collector import Sampler


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """problems: of each task (0: all). samples: of each problem, as the run samples (0: none). greedy: one more."""

    problems: int = 0
    samples: int = 4
    greedy: bool = True


class Stages(Protocol):
    """The methods of a `View` that an evaluation needs."""

    def stage(self, text: str, fraction: float | None = None) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Problems:
    """The held-out prompts of a task. accuracy_reward: the reward that decides which answers are right."""

    task: str
    accuracy_reward: str
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of one model. name: its checkpoint's name, or its path."""

    name: str
    tasks: list[TaskResult]
    greedy: list[Group]
    sampled: list[Group]


def evaluate(
    run: Run, job: EngineJob, models: Sequence[tuple[str, str]], asked: EvaluationOptions, view: Stages, watch: Watch
) -> Iterator[Evaluated]:
    """Evaluate each model, (name, path), in turn; all have one architecture.

    view: shows stages and warnings. watch: called with the progress of the stage.

    Raises ConfigError, RunError or EngineError as a run does.
    """
    from grpocli.distributed.world import World
    from grpocli.models.loading import load_tokenizer

    world = World(run.hardware)
    tokenizer = load_tokenizer(run.model, job.model_path)
    problems, say = [], view.stage
    for name, task in tasks_of(run.task).items():
        with about(key_of(run.task, name)):
            problems.append(_problems(name, task, run, tokenizer, asked))
        if (have := len(problems[-1].prompts)) < asked.problems:
            view.note(f"{name} has {have:,} problems to evaluate on, fewer than the {asked.problems:,} asked for")
    with ExitStack() as stack:
        stack.callback(world.close)
        for reward in run.reward.values():
            stack.callback(reward.close)
        say("starting the engine")
        stack.enter_context(run.engine.launch(replace(job, progress=watch.progress)))
        for version, (name, path) in enumerate(models, 1):
            say(f"loading {name}")
            yield _evaluated(
                run, _sampler(run, job, path, world, tokenizer, problems), version, name, problems, asked, say, watch
            )


def _evaluated(
    run: Run,
    sampler: Sampler,
    version: int,
    name: str,
    problems: Sequence[Problems],
    asked: EvaluationOptions,
    say: Callable[[str], None],
    watch: Watch,
) -> Evaluated:
    """Evaluate one model, and release it before the next one is loaded."""
    found = Evaluated(name, [], [], [])
    try:
        sampler.engine.sync(version)
        for one in problems:
            say(f"{name}: {one.task}, {len(one.prompts):,} problems")
            result, greedy, sampled = _of_task(run, sampler, one, asked, watch)
            found.tasks.append(result)
            found.greedy.extend(greedy)
            found.sampled.extend(sampled)
    finally:
        sampler.episodes.close()
        sampler.engine.close()
    return found


def _problems(name: str, task: Any, run: Run, tokenizer: PreTrainedTokenizerBase, asked: EvaluationOptions) -> Problems:
    examples = task.examples("eval")
    limits = run.rollout.max_prompt_tokens, run.rollout.long_prompts
    prompts = PromptSet(examples, tokenizer, *limits, f"{name} eval", name, asked.problems or None)
    accuracy_reward = accuracy_reward_of(task, run.reward, run.eval.reward)
    run.reward[accuracy_reward].check(columns_of(examples[0]))
    return Problems(name, accuracy_reward, [prompts.prompt(i, uid=f"{name}-{i}") for i in range(len(prompts))])


def _sampler(
    run: Run, job: EngineJob, path: str, world: World, tokenizer: Any, problems: Sequence[Problems]
) -> Sampler:
    import torch

    from grpocli.models.loading import load_policy
    from grpocli.training.collector import Sampler
    from grpocli.training.policy import Policy

    model = load_policy(run.model, job.model_path, path, run.seed).to(world.device)
    policy = Policy(model, model, getattr(torch, job.dtype))
    engine = run.engine.connect(EngineContext(job, policy, tokenizer, world, run.sync, sampling=run.rollout.sampling))
    environments = {
        name: environment for name, task in tasks_of(run.task).items() if (environment := environment_of(task))
    }
    accuracy_rewards = {one.task: [one.accuracy_reward] for one in problems}
    scorer = Scorer(run.reward, run.rollout.max_reward_errors, accuracy_rewards, limits_of(run.task))
    return Sampler(world, engine, tokenizer, scorer, environments)


def _of_task(
    run: Run, sampler: Sampler, one: Problems, asked: EvaluationOptions, watch: Watch
) -> tuple[TaskResult, list[Group], list[Group]]:
    sampling, problems = run.rollout.sampling, len(one.prompts)
    whole = problems * (asked.samples + asked.greedy)
    greedy: list[Group] = []
    sampled: list[Group] = []
    if asked.greedy:
        likeliest = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        greedy = _groups(sampler, one, 1, likeliest, run.seed, watch.part(0, whole))
    if asked.samples:
        before = problems * asked.greedy
        sampled = _groups(sampler, one, asked.samples, sampling, run.seed, watch.part(before, whole))
    accuracy_rewards = AccuracyRewards({one.task: one.accuracy_reward}, run.reward)
    result = task_result(one.task, accuracy_rewards, greedy, sampled, sampling.max_tokens)
    return result, greedy, sampled


def _groups(sampler: Sampler, one: Problems, n: int, sampling: Any, seed: int, watch: Watch) -> list[Group]:
    """Samples with the seeds of an evaluation within a run, so that models differ by their weights alone."""
    from grpocli.training.accuracy import eval_seeds

    groups, stats = sampler.generate_and_score(one.prompts, eval_seeds(seed, one.prompts), n, sampling, watch)
    sampler.scorer.check_errors(stats)
    return groups


def checkpoints_of(run: Path, wanted: str) -> list[tuple[str, str]]:
    """`all`, or steps such as `10,20`, of a run's checkpoints; (name, path), oldest first. Raises ConfigError."""
    from grpocli.errors import ConfigError
    from grpocli.training.resume_point import checkpoints

    found = {int(path.name.removeprefix("step_")): path for path in checkpoints(run / "checkpoints")}
    steps = sorted(found)
    if wanted != "all":
        try:
            steps = [int(step) for step in wanted.split(",")]
        except ValueError as error:
            raise ConfigError(f"--checkpoints {wanted}: write all, or steps such as 10,20") from error
    missing = [step for step in steps if step not in found]
    if missing or not steps:
        have = ", ".join(map(str, sorted(found))) or "none"
        raise ConfigError(f"--checkpoints {wanted}: {run} has {have} (checkpoint.every, checkpoint.keep)")
    return [(f"step {step}", str(found[step])) for step in steps]
