"""`grpocli eval`: samples and scores completions of held-out problems, for one model or several checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpocli.environments.environment import loaded_environment_of
from grpocli.errors import ConfigError
from grpocli.progress import Watch
from grpocli.rewards.scorer import Scorer
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.runs.metrics import to_json
from grpocli.runs.run_dir import step_of
from grpocli.tasks.prompt_source import accuracy_reward_of, doubtful_choices
from grpocli.tasks.prompts import PromptMaker, PromptSet
from grpocli.tasks.task import columns_of, errors_below, key_of
from grpocli.training.accuracy import AccuracyRewards, eval_seeds, question_scores
from grpocli.types import Group, Prompt, Sampling
from grpocli_tools.evaluation.significance import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.training.collector import Sampler
    from grpocli.views.view import View


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The accuracy of one task."""

    task: str
    questions: int
    """Those with a scored sample."""
    failed: int
    """Samples that the reward could not score, which are left out."""
    mean_length: float
    """Tokens that the model wrote."""
    truncated: float
    """The share of samples that were cut off."""
    scores: dict[str, Estimate] = field(default_factory=dict)
    """`greedy`, `mean@N`, `pass@K`, `maj@N`."""
    by_problem: dict[str, float] = field(default_factory=dict)
    """The share of right samples of each question (`problem_id`), greedy ones only if there are no others."""

    @classmethod
    def of(
        cls, task: str, accuracy: AccuracyRewards, greedy: Sequence[Group], sampled: Sequence[Group], max_tokens: int
    ) -> TaskResult:
        """The result of a task's groups. greedy: groups of one completion each."""
        groups = [*greedy, *sampled]
        done = [rollout.completion for group in groups for rollout in group.rollouts]
        failed = [[math.isnan(one) for one in accuracy.right(group)] for group in groups]
        scores = question_scores(accuracy, greedy, sampled, max_tokens)
        return cls(
            task=task,
            questions=len({group.uid for group, none in zip(groups, failed, strict=True) if not all(none)}),
            failed=sum(map(sum, failed)),
            mean_length=float(np.mean([completion.written for completion in done])),
            truncated=float(np.mean([completion.truncated for completion in done])),
            scores={name: Estimate.of(values) for name, values in scores.items()},
            by_problem=accuracy.by_problem(sampled or greedy),
        )

    def as_dict(self) -> dict[str, Any]:
        """The result in JSON types; unknown numbers are null."""
        return dict(to_json(asdict(self)))


@dataclass(frozen=True, slots=True)
class ModelResult:
    """The results of one model."""

    name: str
    """Its checkpoint's name, or its path."""
    tasks: list[TaskResult]
    greedy: list[Group]
    sampled: list[Group]


@dataclass(frozen=True, slots=True)
class Problems:
    """The held-out prompts of a task."""

    task: str
    accuracy_reward: str
    """The reward that decides which answers are right."""
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of models on the held-out problems of a run's tasks."""

    run: Run
    job: EngineJob
    view: View
    problems: int = 0
    """Of each task; 0: all."""
    samples: int = 4
    """Of each problem; 0: none."""
    greedy: bool = True
    """Whether a greedy completion of each problem comes on top."""

    def results(self, models: Sequence[tuple[str, str]]) -> Iterator[ModelResult]:
        """The results of each model, (name, path), in turn. All models have one architecture.

        Raises ConfigError, RunError or EngineError as a run does.
        """
        from grpocli.distributed.world import World
        from grpocli.models.loading import load_tokenizer

        tokenizer = load_tokenizer(self.run.model, self.job.model_path)
        with ExitStack() as stack:
            world = World(self.run.hardware)
            stack.callback(world.close)
            for reward in self.run.reward.values():
                stack.callback(reward.close)
            problems = [self._load(name, tokenizer) for name in self.run.tasks]
            for doubt in doubtful_choices(self.run).values():
                self.view.note(doubt)
            self.view.stage("starting the engine")
            stack.enter_context(self.run.engine.resolved().launch(replace(self.job, progress=self.view.progress)))
            for version, (name, path) in enumerate(models, 1):
                self.view.stage(f"loading {name}")
                yield self._evaluate(name, version, self._sampler(path, world, tokenizer, problems), problems)

    def _load(self, name: str, tokenizer: PreTrainedTokenizerBase) -> Problems:
        run, task = self.run, self.run.tasks[name]
        with errors_below(key_of(run.task, name)):
            examples = task.examples("eval")
            maker = PromptMaker.of(name, task, run, tokenizer)
            prompts = PromptSet(examples, maker, f"{name} eval", self.problems or None)
            accuracy_reward = accuracy_reward_of(task, run.reward, run.eval.reward)
            run.reward[accuracy_reward].check(columns_of(examples[0]))
        if len(prompts) < self.problems:
            fewer = f"fewer than the {self.problems:,} asked for"
            self.view.note(f"{name} has {len(prompts):,} problems to evaluate on, {fewer}")
        return Problems(name, accuracy_reward, [prompts.prompt(i, uid=f"{name}-{i}") for i in range(len(prompts))])

    def _sampler(
        self, path: str, world: World, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problems]
    ) -> Sampler:
        import torch

        from grpocli.models.loading import load_policy
        from grpocli.training.collector import Sampler
        from grpocli.training.policy import Policy

        run, job = self.run, self.job
        model = load_policy(run.model, job.model_path, path, run.seed, job.dtype, world.device).to(world.device)
        policy = Policy(model, model, getattr(torch, job.dtype))
        context = EngineContext(job, policy, tokenizer, world, run.sync)
        engine = run.engine.resolved().connect(context)
        tasks = run.tasks.items()
        environments = {name: found for name, task in tasks if (found := loaded_environment_of(task))}
        of_tasks = {one.task: [one.accuracy_reward] for one in problems}
        scorer = Scorer(run.reward, run.rollout.max_reward_errors, of_tasks)
        return Sampler(world, engine, tokenizer, scorer, environments)

    def _evaluate(self, name: str, version: int, sampler: Sampler, problems: Sequence[Problems]) -> ModelResult:
        """Evaluate one model, and release it before the next one is loaded."""
        found, sampling = ModelResult(name, [], [], []), self.run.rollout.sampling
        most_likely = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        try:
            sampler.engine.sync(version)
            for one in problems:
                self.view.stage(f"{name}: {one.task}, {len(one.prompts):,} problems")
                watch, total = Watch(self.view.progress), len(one.prompts) * (self.samples + self.greedy)
                before = len(one.prompts) * self.greedy
                greedy = self._groups(sampler, one, int(self.greedy), most_likely, watch.part(0, total))
                sampled = self._groups(sampler, one, self.samples, sampling, watch.part(before, total))
                accuracy = AccuracyRewards({one.task: one.accuracy_reward}, self.run.reward)
                found.tasks.append(TaskResult.of(one.task, accuracy, greedy, sampled, sampling.max_tokens))
                found.greedy.extend(greedy)
                found.sampled.extend(sampled)
        finally:
            sampler.episodes().close()
            sampler.engine.close()
        return found

    def _groups(self, sampler: Sampler, one: Problems, n: int, sampling: Sampling, watch: Watch) -> list[Group]:
        """Scored samples, with the seeds of evaluations within a run: models differ only by their weights."""
        if not n:
            return []
        seeds = eval_seeds(self.run.seed, one.prompts)
        groups, stats = sampler.generate_and_score(one.prompts, seeds, n, sampling, watch)
        sampler.scorer.check_errors(stats)
        return groups


def checkpoints_of(run: Path, wanted: str) -> list[tuple[str, str]]:
    """(name, path) of a run's checkpoints. wanted: `all`, or steps such as `10,20`. Raises ConfigError."""
    from grpocli.training.checkpoint import checkpoints

    found = {str(step_of(path)): path for path in sorted(checkpoints(run / "checkpoints"), key=step_of)}
    steps = list(found) if wanted == "all" else wanted.split(",")
    if not steps or not found.keys() >= set(steps):
        problem = f"{run} has {', '.join(found) or 'none'} (checkpoint.every, checkpoint.keep)"
        raise ConfigError(problem, key="--checkpoints", value=wanted, hint="write all, or steps such as 10,20")
    return [(f"step {step}", str(found[step])) for step in steps]
