"""The lines printed before a run starts: model, task, method, and the work of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpocli.config.user_code import choice_of
from grpocli.rollout.vllm.config import VllmOptions
from grpocli.text import counted

if TYPE_CHECKING:
    from grpocli.config.schema import Rollouts, Run
    from grpocli.hardware import Devices
    from grpocli.rollout.engine import EngineJob


def opening_lines(run: Run, job: EngineJob, devices: Devices, choices: Mapping[str, str]) -> list[str]:
    """Model, dtype, device, task, rewards, algorithm and engine. choices: {config group: choice}."""
    choice = choices.get("model", job.model_path)
    model = job.model_path if choice == job.model_path else f"{choice} ({job.model_path})"
    gpus = len(devices.train)
    where = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "the CPU"
    engine = choice_of("engine", run.engine.resolved())
    scored = f"scored by {', '.join(run.reward)}" if run.reward else "without rewards"
    return [
        f"model   {model}, in {job.dtype} on {where}",
        f"task    {', '.join(run.tasks)}, {scored}",
        f"method  algorithm={choices.get('algorithm', '?')}, engine={engine}",
    ]


def plan_lines(run: Run, devices: Devices) -> list[str]:
    """The work of a step, an evaluation and the run, one fact a line."""
    rollout, train = run.rollout, run.train
    prompts, rows = rollout.prompts_per_step, rollout.prompts_per_step * rollout.group_size
    low, more = divmod(prompts, train.minibatches)
    groups = f"{low} or {low + 1}" if more else str(low)
    processes, split = devices.processes * run.hardware.train_nodes, run.hardware.context_parallel
    shared = f", {split} share each" if split > 1 else ""
    rounds = run.algorithm.keep.max_rounds
    refill = f", refilled up to {rounds} rounds" if rounds > 1 else ""
    limits = f"up to {rollout.max_prompt_tokens} + {rollout.max_completion_tokens} tokens each"
    sample = f"sample  {prompts} prompts x {rollout.group_size} = {rows} completions a step, {limits}{refill}"
    update = (
        f"train   {train.epochs} x {train.minibatches} = {counted(train.updates_per_step, 'update')} a step, "
        f"{groups} groups each, micro-batches of up to {split * train.micro_batch_tokens:,} tokens, "
        f"{counted(processes, 'process')}{shared}"
    )
    total = (
        f"run     {counted(train.steps, 'step')}, {counted(train.steps * train.updates_per_step, 'update')}, "
        f"{train.steps * rows:,} completions"
    )
    learn = f"learn   {prompts} answers a step, {limits}"
    first = learn if run.algorithm.supervised else sample
    return [first, *_overlap(rollout), update, *_evaluation(run), *_devices(run, devices), total]


def _evaluation(run: Run) -> list[str]:
    """The completions of each evaluation, and the key that reduces them."""
    every = f", every {counted(run.eval.every, 'step')}" if run.eval.every else ""
    if not (problems := run.eval.n_problems(cpu=False)) or not run.reward:
        return []
    tasks = len(run.tasks)
    of_each = f"{counted(tasks, 'task')} x " if tasks > 1 else ""
    each = f"{of_each}{counted(problems, 'problem')} x ({run.eval.samples} + 1 greedy)"
    whole = f"{each} = {tasks * problems * (run.eval.samples + 1):,} completions, before{every} and after"
    if run.eval.stop_at.metric:
        whole += f"; {run.eval.stop_at.name} of {run.eval.stop_at.threshold:g} ends the run"
    return [f"eval    {whole} (fewer: eval.problems={max(1, problems // 4)})"]


def _devices(run: Run, devices: Devices) -> list[str]:
    """The devices; no line for the CPU of one machine."""
    nodes = run.hardware.rollout_nodes
    if run.hardware.nodes == 1 and not devices.train:
        return []
    each = f"{counted(run.hardware.train_nodes, 'machine')}, each: " if run.hardware.nodes > 1 else ""
    serve = f"; serve on {counted(nodes, 'machine')}" if nodes else ""
    engine = run.engine.resolved()
    if devices.rollout and isinstance(engine, VllmOptions):
        serve = f", {engine.memory_share(devices.shared is not False):g} of the memory for vLLM"
    return [f"devices {each}{devices}{serve}"]


def _overlap(rollout: Rollouts) -> list[str]:
    if not rollout.max_staleness:
        return []
    change = "under running requests" if rollout.in_flight else "between two steps' completions"
    steps = counted(rollout.max_staleness, "step")
    return [f"ahead   {steps} at most, sampled while another trains; weights change {change}"]
