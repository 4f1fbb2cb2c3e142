"""Building a trainer from the parts of a run: load data and models, connect the engine, restore a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpocli.algorithm import Algorithm
from grpocli.algorithm.kl import has_teacher
from grpocli.errors import ConfigError
from grpocli.models.loading import (
    checkpoint_activations,
    configured_end_ids,
    end_token_ids,
    load_model,
    load_policy,
    load_tokenizer,
    takes_flex,
)
from grpocli.progress import Progress, Watch
from grpocli.rewards.scorer import Scorer
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.sampling import keep_stop_token_ids
from grpocli.runs.saved_run import SavedRun
from grpocli.tasks.prompt_source import PromptSource, accuracy_rewards_of, doubtful_choices
from grpocli.tasks.task import errors_below
from grpocli.training import checkpoint
from grpocli.training.accuracy import AccuracyRewards, Evaluator
from grpocli.training.checkpoint import Checkpointer, restoring
from grpocli.training.collector import Collector, Sampler, TargetSampler
from grpocli.training.optim import make_optimizer
from grpocli.training.packing import FlexPacked, Packed
from grpocli.training.policy import BaseReference, Policy, Reference
from grpocli.training.schedule import Schedule
from grpocli.training.stream import RolloutState, RolloutStream
from grpocli.training.teachers import Teachers, load_teachers
from grpocli.training.trainer import Trainer
from grpocli.training.trials import choose_layout, update_sampling
from grpocli.training.update import UpdateChecks, Updater
from grpocli.types import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpocli.config.schema import Run
    from grpocli.distributed.world import World
    from grpocli.processes.signals import StopSignal
    from grpocli.tracking.recorder import Recorder
    from grpocli.types import Prompt


def load_prompts(run: Run, model_path: str) -> PromptSource:
    """The prompts of a run, tokenised for the model at a path."""
    tokenizer = load_tokenizer(run.model, model_path)
    return PromptSource.of(run, tokenizer, end_token_ids(configured_end_ids(run.model, model_path), tokenizer))


def build_trainer(
    run: Run,
    job: EngineJob,
    world: World,
    recorder: Recorder,
    stop: StopSignal,
    checkpoint_path: Path | None,
    data: PromptSource,
    model: PreTrainedModel | None = None,
) -> Trainer:
    """The trainer of a run. model: the policy's, on the CPU, if it is loaded already. Collective."""
    _check_rewards(run, data, recorder)
    state, saved, updater = _load(run, job, world, data, recorder, checkpoint_path, model)
    policy = updater.policy
    keep_stop_token_ids(policy.model, data.tokenizer)
    for hint in _hints(run, data, policy.model.config.get_text_config()):
        recorder.view.note(hint)

    context = EngineContext(
        job=job,
        policy=policy,
        tokenizer=data.tokenizer,
        world=world,
        sync=run.sync,
        in_flight=run.rollout.in_flight and run.rollout.max_staleness > 0,
        stopping=stop.requested,
        before_change=lambda: trainer.wait_for_checkpoint(),
    )
    engine = run.engine.resolved().connect(context)
    scorer = Scorer(run.reward, run.rollout.max_reward_errors, data.rewards)
    sampler = Sampler(world, engine, data.tokenizer, scorer, data.environments)
    sampler.episodes().check()
    kind = TargetSampler if run.algorithm.supervised else Sampler
    source = kind(world, engine, data.tokenizer, scorer, data.environments, sampler.scoring)
    watch = Watch(recorder.progress_of("rollout"))
    collector = make_collector(run, source, data.draw, watch)
    collector.epoch_draws = data.epoch if run.algorithm.supervised else None
    trainer = Trainer(
        run=run,
        world=world,
        policy=policy,
        tokenizer=data.tokenizer,
        engine=engine,
        collector=collector,
        stream=RolloutStream(collector, world, run.rollout, state.step, saved),
        updater=updater,
        update_checks=UpdateChecks(run, recorder.run_dir, policy, world),
        evaluator=_evaluator(run, sampler, data, recorder, stop, updater),
        recorder=recorder,
        checkpointer=_checkpointer(run, world, updater, data, recorder),
        stop=stop,
        state=state,
    )
    return trainer


def _check_rewards(run: Run, data: PromptSource, recorder: Recorder) -> None:
    """Check rewards against the columns of their tasks; show the warnings of parts and the reports of data sets."""
    for task in data.tasks:
        with errors_below(task.key):
            for name in task.rewards:
                run.reward[name].check(task.columns)
    for part in run.reward.values():
        if warning := getattr(part, "warning", ""):
            recorder.view.warn(warning)
    recorder.warn_once(doubtful_choices(run))
    for report in data.reports:
        recorder.view.note(report)


def _hints(run: Run, data: PromptSource, config: Any) -> Iterator[str]:
    """What runs and is often not meant. config: of the language model."""
    room, longest = getattr(config, "max_position_embeddings", None), run.rollout.max_completion_tokens
    if room and longest >= room:
        yield f"rollout.max_completion_tokens={longest}: with its prompt, the model is made for {room}"
    marks = data.tokenizer.all_special_tokens
    for task, part in zip(data.tasks, run.tasks.values(), strict=True):
        if not data.tokenizer.chat_template:
            continue
        prompt = task.draw(0, "")
        if data.tokenizer.decode(prompt.token_ids).rstrip().endswith("<think>"):
            for name in task.rewards:
                if getattr(run.reward[name], "wants_opened_thought", False):
                    yield f"the chat template opens <think>, so completions do not: shorten reward.{name}.pattern"
        text = prompt.text if hasattr(run.model, "path") and hasattr(part, "format") else []
        if isinstance(text, str) and not any(mark in text for mark in marks):
            yield f"prompts are plain text: an instruct model, which has a chat template, needs {task.key}.format=chat"


def _load(
    run: Run,
    job: EngineJob,
    world: World,
    data: PromptSource,
    recorder: Recorder,
    path: Path | None,
    model: PreTrainedModel | None,
) -> tuple[checkpoint.State, RolloutState, Updater]:
    """The state, rollouts, models and optimizer of a checkpoint, or of a new run."""
    rollout, rewards = run.rollout, [] if run.algorithm.supervised else sorted(run.reward)
    settings: dict[str, Any] = {"seed": run.seed, "rewards": rewards, "sampling": asdict(rollout.sampling)}
    settings |= {name: getattr(rollout, name) for name in ("group_size", "prompts_per_step", "max_staleness")}
    state, saved = checkpoint.State(run=SavedRun(recorder.run_dir.path).id), RolloutState(0, settings)
    with restoring(path):
        if path:
            state = checkpoint.load_state(path)
            saved = RolloutState.load(path, state.draws, settings, data.draw)
        updater = load_updater(run, job, world, path, state, recorder.progress_of("train"), model)
    recorder.seconds_before = state.seconds
    for note in choose_layout(run, world, updater.policy, updater.reference):
        recorder.view.note(note)
    return state, saved, updater


def load_updater(
    run: Run,
    job: EngineJob,
    world: World,
    checkpoint_path: Path | None,
    state: checkpoint.State,
    progress: Progress,
    model: PreTrainedModel | None = None,
) -> Updater:
    """The updater of a checkpoint, or of a new run. Call `choose_layout` before the first update. Collective."""
    with world.parallel.loading():
        path = str(checkpoint_path) if checkpoint_path else job.model_path
        model = model or load_policy(run.model, job.model_path, path, run.seed, job.dtype, world.device)
        policy, optimizer = _policy(run, job, world, model)
        reference = load_reference(run, job, policy, checkpoint_path)
    if checkpoint_path:
        checkpoint.load_optimizer(checkpoint_path, policy, optimizer, run.optim)
    if state.scaler:
        world.parallel.scaler.load_state_dict(state.scaler)
    return Updater(
        world=world,
        policy=policy,
        reference=reference,
        algorithm=run.algorithm,
        optim_config=run.optim,
        optimizer=optimizer,
        train=run.train,
        sampling=update_sampling(run),
        total_updates=run.train.steps * run.train.updates_per_step,
        updates=state.updates,
        progress=progress,
    )


def _checkpointer(run: Run, world: World, updater: Updater, data: PromptSource, recorder: Recorder) -> Checkpointer:
    kept = updater.reference if run.algorithm.kl.sync_every or run.model.lora.path else None
    reference = kept if isinstance(kept, Reference) else None
    contents = checkpoint.Contents(updater.policy, updater.optimizer, data.tokenizer, reference)
    return Checkpointer(recorder.run_dir, run.checkpoint.keep, contents, world, recorder.progress_of("checkpoint"))


def _policy(run: Run, job: EngineJob, world: World, model: PreTrainedModel) -> tuple[Policy, Any]:
    """The policy and its optimizer."""
    if run.train.gradient_checkpointing:
        checkpoint_activations(model)
    dtype = getattr(torch, job.dtype)
    wrapped, optimizer = world.parallel.prepare(model, dtype, partial(make_optimizer, run.optim))
    policy = Policy(model, wrapped, dtype, world.parallel)
    policy.recomputes = run.train.gradient_checkpointing
    policy.shared_with = world.context_parallel
    policy.packed = FlexPacked if takes_flex(run.model.attention, world.device.type == "cuda") else Packed
    return policy, optimizer


def load_reference(
    run: Run, job: EngineJob, policy: Policy, checkpoint_path: Path | None
) -> Reference | Teachers | None:
    """The teachers, a checkpoint's reference, or the initial model; None if the algorithm needs none. Collective."""
    if not run.algorithm.needs_reference:
        return None
    if has_teacher(run.algorithm.kl):
        return load_teachers(run, policy)
    moves = run.algorithm.kl.sync_every
    if run.model.lora.rank and not moves and not run.model.lora.path:
        return BaseReference(policy)
    if run.model.lora.path and moves:
        problem = "a reference that moves does not start from an adapter: set it to null, or merge the adapter"
        raise ConfigError(problem, key="algorithm.kl.sync_every", value=moves)
    saved = checkpoint_path / checkpoint.REFERENCE if checkpoint_path else None
    path = str(saved) if saved and saved.is_dir() else job.model_path
    if run.model.lora.path:
        return Reference(load_policy(run.model, job.model_path, path, run.seed, job.dtype), policy)
    return Reference(load_model(run.model, path), policy)


def make_collector(run: Run, sampler: Sampler, draw: Callable[[int], Prompt], watch: Watch) -> Collector:
    """The collector of a new run. draw: the prompt of a draw number."""
    algorithm: Algorithm = run.algorithm
    rewards = {} if algorithm.supervised else run.reward
    schedule = Schedule(
        run.rollout.prompts_per_step,
        run.rollout.max_staleness,
        run.train.steps,
        max_rounds=algorithm.keep.max_rounds,
        in_order=run.rollout.in_order,
        carry=algorithm.keep.surplus == "carry",
    )
    return Collector(
        sampler=sampler,
        algorithm=algorithm,
        draw=draw,
        schedule=schedule,
        reward_weights={name: reward.weight for name, reward in rewards.items()},
        accuracy_rewards=accuracy_rewards_of(run) if rewards else {},
        group_size=run.rollout.group_size,
        sampling=run.rollout.sampling,
        seed=run.seed,
        watch=watch,
    )


def _evaluator(
    run: Run, sampler: Sampler, data: PromptSource, recorder: Recorder, stop: StopSignal, updater: Updater
) -> Evaluator:
    prompts = data.problems()
    rows = [
        Row(prompt.token_ids, ids, [1] * len(ids), 1.0, number, [0.0] * len(ids))
        for number, prompt in enumerate(prompts)
        if (ids := prompt.target_ids)
    ]
    return Evaluator(
        sampler=sampler,
        prompts=prompts,
        samples=run.eval.samples,
        accuracy_rewards=AccuracyRewards(accuracy_rewards_of(run), run.reward),
        sampling=run.rollout.sampling,
        seed=run.seed,
        watch=Watch(recorder.progress_of("eval"), stop.requested_cached),
        target_loss=partial(updater.target_loss, rows) if rows else None,
    )
