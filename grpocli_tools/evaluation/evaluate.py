"""`grpocli eval`: samples and scores completions of held-out problems, for one model or several checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpocli.environments.environment import loaded_environment_of
from grpocli.environments.tools import tools_of
from grpocli.progress import Watch
from grpocli.rewards.scorer import Scorer
from grpocli.rollout.engine import EngineContext, EngineJob, connected
from grpocli.tasks.prompt_set import PromptSet
from grpocli.tasks.prompt_source import accuracy_reward_of, doubtful_choices
from grpocli.tasks.task import columns_of, error_limits_of, errors_below, key_of, tasks_of
from grpocli.training.accuracy import AccuracyRewards
from grpocli.types import Group, Prompt, Sampling
from grpocli_tools.evaluation.results import TaskResult, task_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.training.collector import Sampler


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of an evaluation.

    problems: problems of each task; 0: all. samples: completions of each problem; 0: none. greedy: one more.
    """

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
class ModelResult:
    """The results of one model. name: its checkpoint's name, or its path."""

    name: str
    tasks: list[TaskResult]
    greedy: list[Group]
    sampled: list[Group]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of models on the held-out problems of a run's tasks.

    view: shows stages and warnings. watch: called with the progress of the stage.
    """

    run: Run
    job: EngineJob
    options: EvaluationOptions
    view: Stages
    watch: Watch

    def results(self, models: Sequence[tuple[str, str]]) -> Iterator[ModelResult]:
        """The results of each model, (name, path), in turn. All models have one architecture.

        Raises ConfigError, RunError or EngineError as a run does.
        """
        from grpocli.distributed.world import World
        from grpocli.models.loading import load_tokenizer

        world = World(self.run.hardware)
        tokenizer = load_tokenizer(self.run.model, self.job.model_path)
        problems = self._load_problems(tokenizer)
        with ExitStack() as stack:
            stack.callback(world.close)
            for reward in self.run.reward.values():
                stack.callback(reward.close)
            self.view.stage("starting the engine")
            stack.enter_context(self.run.engine.resolved().launch(replace(self.job, progress=self.watch.progress)))
            for version, (name, path) in enumerate(models, 1):
                self.view.stage(f"loading {name}")
                sampler = self._sampler(path, world, tokenizer, problems)
                yield self._evaluate(name, version, sampler, problems)

    def _load_problems(self, tokenizer: PreTrainedTokenizerBase) -> list[Problems]:
        for doubt in doubtful_choices(self.run).values():
            self.view.note(doubt)
        found = []
        for name, task in tasks_of(self.run.task).items():
            with errors_below(key_of(self.run.task, name)):
                found.append(self._problems(name, task, tokenizer))
            have, wanted = len(found[-1].prompts), self.options.problems
            if have < wanted:
                self.view.note(f"{name} has {have:,} problems to evaluate on, fewer than the {wanted:,} asked for")
        return found

    def _problems(self, name: str, task: Any, tokenizer: PreTrainedTokenizerBase) -> Problems:
        run, examples = self.run, task.examples("eval")
        limits = run.rollout.max_prompt_tokens, run.rollout.long_prompts
        tools = tools_of(loaded_environment_of(task))
        limit, last_turn = self.options.problems or None, getattr(task, "last_turn", None)
        prompts = PromptSet(examples, tokenizer, *limits, f"{name} eval", name, limit, tools=tools, last_turn=last_turn)
        accuracy_reward = accuracy_reward_of(task, run.reward, run.eval.reward)
        run.reward[accuracy_reward].check(columns_of(examples[0]))
        return Problems(name, accuracy_reward, [prompts.prompt(i, uid=f"{name}-{i}") for i in range(len(prompts))])

    def _sampler(
        self, path: str, world: World, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problems]
    ) -> Sampler:
        """A sampler of the model at `path`."""
        import torch

        from grpocli.models.loading import load_policy
        from grpocli.training.collector import Sampler
        from grpocli.training.policy import Policy

        run, job = self.run, self.job
        model = load_policy(run.model, job.model_path, path, run.seed, job.dtype, world.device).to(world.device)
        policy = Policy(model, model, getattr(torch, job.dtype))
        context = EngineContext(job, policy, tokenizer, world, run.sync, sampling=run.rollout.sampling)
        engine = connected(run.engine.resolved(), context)
        environments = {
            name: environment
            for name, task in tasks_of(run.task).items()
            if (environment := loaded_environment_of(task))
        }
        accuracy_rewards = {one.task: [one.accuracy_reward] for one in problems}
        scorer = Scorer(run.reward, run.rollout.max_reward_errors, accuracy_rewards, error_limits_of(run.task))
        return Sampler(world, engine, tokenizer, scorer, environments)

    def _evaluate(self, name: str, version: int, sampler: Sampler, problems: Sequence[Problems]) -> ModelResult:
        """Evaluate one model, and release it before the next one is loaded."""
        found = ModelResult(name, [], [], [])
        try:
            sampler.engine.sync(version)
            for one in problems:
                self.view.stage(f"{name}: {one.task}, {len(one.prompts):,} problems")
                result, greedy, sampled = self._task_result(sampler, one)
                found.tasks.append(result)
                found.greedy.extend(greedy)
                found.sampled.extend(sampled)
        finally:
            sampler.episodes.close()
            sampler.engine.close()
        return found

    def _task_result(self, sampler: Sampler, one: Problems) -> tuple[TaskResult, list[Group], list[Group]]:
        options, sampling, problems = self.options, self.run.rollout.sampling, len(one.prompts)
        total = problems * (options.samples + options.greedy)
        greedy: list[Group] = []
        sampled: list[Group] = []
        if options.greedy:
            most_likely = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
            greedy = self._groups(sampler, one, 1, most_likely, self.watch.part(0, total))
        if options.samples:
            before = problems * options.greedy
            sampled = self._groups(sampler, one, options.samples, sampling, self.watch.part(before, total))
        accuracy_rewards = AccuracyRewards({one.task: one.accuracy_reward}, self.run.reward)
        result = task_result(one.task, accuracy_rewards, greedy, sampled, sampling.max_tokens)
        return result, greedy, sampled

    def _groups(self, sampler: Sampler, one: Problems, n: int, sampling: Sampling, watch: Watch) -> list[Group]:
        """Scored samples, with the seeds of evaluations within a run: models differ only by their weights."""
        from grpocli.training.accuracy import eval_seeds

        seeds = eval_seeds(self.run.seed, one.prompts)
        groups, stats = sampler.generate_and_score(one.prompts, seeds, n, sampling, watch)
        sampler.scorer.check_errors(stats)
        return groups


def checkpoints_of(run: Path, wanted: str) -> list[tuple[str, str]]:
    """(name, path) of a run's checkpoints. wanted: `all`, or steps such as `10,20`. Raises ConfigError."""
    from grpocli.errors import ConfigError
    from grpocli.training.resume_point import checkpoints, step_of

    found = {step_of(path): path for path in checkpoints(run / "checkpoints")}
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
