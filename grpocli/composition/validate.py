"""Checks of keys that depend on each other, before anything heavy starts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import nearest, one_of, require
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.rollout.engine import EnginePart


def check_run(run: Run) -> None:
    """Raise ConfigError for the first contradiction between keys."""
    _check_engine(run)
    _check_supervised(run)
    _check_rewards(run)
    _check_stop_at(run)
    _check_teachers(run)
    _check_difficulty(run)
    _check_max_rl(run)
    _check_curriculum(run)
    _check_batch(run)
    if run.train.data_epochs is None:  # with it the number of steps is known once the data is read
        check_schedule(run)
    _check_structure(run)
    _check_group_fits(run)
    _check_waits(run)
    check_nodes(run, run.engine)
    check_shares(run, run.hardware.processes or 1)
    check_context_parallel(run, run.hardware.processes)
    _check_parallel(run)
    check_prefetch(run, run.engine)


def _check_supervised(run: Run) -> None:
    """Require groups of one in supervised training, of two or more elsewhere; refuse what needs samples of a policy."""
    from grpocli.algorithm.keep import Dynamic
    from grpocli.environments.environment import TOOLS, environment_of
    from grpocli.tasks.curriculum import OrderKeys
    from grpocli.tasks.task import key_of, tasks_of

    algorithm, rollout = run.algorithm, run.rollout
    if not algorithm.supervised:
        require(rollout, "group_size", rollout.group_size >= 2, "a group is compared with itself: it needs at least 2")
        return
    why = "supervised training has one answer for each prompt, from the data"
    require(rollout, "group_size", rollout.group_size == 1, f"{why}: set it to 1")
    require(rollout, "max_staleness", rollout.max_staleness == 0, f"{why}: set it to 0")
    if isinstance(algorithm.keep, Dynamic):
        raise ConfigError(f"{why}: choose algorithm/keep=all", key="algorithm/keep", value="dynamic")
    if algorithm.has_correction or algorithm.takes_sampler_as_old:
        raise ConfigError(f"{why}, not from a sampler: choose none", key="algorithm/correction")
    for name, task in tasks_of(run.task).items():
        key = key_of(run.task, name)
        environment = environment_of(task)
        if environment and environment.name != TOOLS:  # tools are only shown
            problem = f"{why}, and this task is played in turns"
            raise ConfigError(problem, key=f"{key}.environment.name", value=environment.name)
        if OrderKeys.of(task).uses_pass_rates:
            problem = f"{why}, so problems have no pass rates"
            hint = "choose another order, or give difficulty_column"
            raise ConfigError(problem, key=f"{key}.order", value=OrderKeys.of(task).order, hint=hint)


def check_schedule(run: Run) -> None:
    """Raise ConfigError for a schedule of the learning rate that does not fit into the run's updates."""
    from grpocli.training.optim import Optimizer

    if isinstance(run.optim, Optimizer):
        run.optim.check_total(run.train.steps * run.train.updates_per_step)


def _check_rewards(run: Run) -> None:
    """Check that rewards are chosen, that keys name rewards of this run, and that its tasks have what rewards need."""
    from grpocli.algorithm.keep import SCORE
    from grpocli.tasks.task import key_of, tasks_of

    if not run.reward:
        raise ConfigError("choose at least one reward, or reward=none", key="reward", value="[]")
    _check_no_reward(run)
    names = list(run.reward)
    for owner in (run.eval, run.algorithm.question_weight, run.algorithm.keep):
        if owner.reward is not None and not (owner is run.algorithm.keep and owner.reward == SCORE):
            one_of(owner, "reward", names, "one of this run's rewards:")
    for task_name, task in tasks_of(run.task).items():
        for name in getattr(task, "rewards", None) or ():
            if name not in names:
                problem = f"choose some of this run's rewards: {', '.join(names)}{nearest(name, names)}"
                raise ConfigError(problem, key=f"{key_of(run.task, task_name)}.rewards", value=name)
    _check_environment_rewards(run)
    _check_group_rewards(run)


def _check_environment_rewards(run: Run) -> None:
    """Refuse the rewards of an environment or of tools if no task has any."""
    from grpocli.environments.environment import TOOL_SCHEMAS, TOOLS, EnvironmentReward, Tools, environment_of
    from grpocli.tasks.task import tasks_of

    tasks = tasks_of(run.task).values()
    environments = {found.name for task in tasks if (found := environment_of(task))}
    has_tools = TOOLS in environments or any(hasattr(task, TOOL_SCHEMAS) for task in tasks)
    for reward in run.reward.values():
        if isinstance(reward, EnvironmentReward) and not environments - {TOOLS}:
            problem, hint = "no task of this run has an environment", "give task.environment.name"
            raise ConfigError(problem, key="reward", value="[environment]", hint=hint)
        if isinstance(reward, Tools) and not has_tools:
            problem, hint = "no task of this run has tools", "give task.tools=[FILE.py:NAME]"
            raise ConfigError(problem, key="reward", value="[tools]", hint=hint)


def _check_group_rewards(run: Run) -> None:
    """Refuse a reward that sees the group where accuracy is measured."""
    from grpocli.rewards.length import GroupLength
    from grpocli.tasks.prompt_source import accuracy_reward_of, rewards_for
    from grpocli.tasks.task import key_of, tasks_of

    others = [name for name, reward in run.reward.items() if not reward.sees_group]
    for task_name, task in tasks_of(run.task).items():
        names = rewards_for(task, run.reward)
        if names and run.reward[name := accuracy_reward_of(task, run.reward, run.eval.reward)].sees_group:
            own = getattr(task, "rewards", None) is not None
            key, value = (f"{key_of(run.task, task_name)}.rewards" if own else "reward"), f"[{', '.join(names)}]"
            if run.eval.reward == name:
                key, value = "eval.reward", name
            problem = f"reward.{name} scores a group by its other rewards, so it cannot measure accuracy"
            hint = f"put one of {', '.join(others)} first" if others else "choose a reward that can before it"
            raise ConfigError(problem, key=key, value=value, hint=hint)
    for reward in run.reward.values():
        if isinstance(reward, GroupLength) and reward.reward is not None:
            one_of(reward, "reward", others)


def _check_stop_at(run: Run) -> None:
    """Require that the accuracy which ends the run is measured within it."""
    from grpocli.rewards.reward import NoReward
    from grpocli.tasks.task import tasks_of

    stop_at = run.eval.stop_at
    if stop_at.metric is None:
        return
    scored = not any(isinstance(reward, NoReward) for reward in run.reward.values())
    problem = "ends the run at an accuracy, and reward=none measures none: choose a reward"
    require(stop_at, "metric", scored, problem)
    name, known = stop_at.metric.removeprefix("eval/"), run.eval.accuracies(list(tasks_of(run.task)))
    require(stop_at, "metric", name in known, f"choose one of {', '.join(known)}{nearest(name, known)}")
    for key in ("every", "problems"):
        problem = f"ends the run after an evaluation, but eval.{key}=0 leaves none within the run: raise it"
        require(stop_at, "metric", getattr(run.eval, key) != 0, problem)


def _check_no_reward(run: Run) -> None:
    """Refuse combinations in which nothing is learned, or which need rewards that do not train."""
    from grpocli.algorithm.advantage import NoAdvantage
    from grpocli.algorithm.keep import Dynamic
    from grpocli.rewards.reward import NoReward

    algorithm, names = run.algorithm, list(run.reward)
    has_advantage = not isinstance(algorithm.advantage, NoAdvantage)
    if any(isinstance(reward, NoReward) for reward in run.reward.values()):
        if len(names) > 1:
            problem = "none is not a reward beside others: leave it out"
            raise ConfigError(problem, key="reward", value=f"[{','.join(names)}]")
        if has_advantage and not algorithm.supervised:
            problem = "without rewards there is no advantage: add algorithm/advantage=none, or choose a reward"
            raise ConfigError(problem, key="reward", value="none")
    if has_advantage:
        return
    if isinstance(algorithm.keep, Dynamic):
        problem = "groups whose rewards differ do not train more than others: choose algorithm/keep=all"
        raise ConfigError(problem, key="algorithm/advantage", value="none")
    if getattr(algorithm.aggregate, "informative_only", False):
        problem = "nothing trains, as algorithm/advantage=none leaves no group with an advantage: set it to false"
        raise ConfigError(problem, key="algorithm.aggregate.informative_only", value="true")
    if algorithm.tokens.needs_entropy:
        problem = "selects tokens of the policy gradient, which algorithm/advantage=none does not have"
        raise ConfigError(problem, key="algorithm/tokens", value="top_entropy", hint="choose algorithm/tokens=all")


def _check_teachers(run: Run) -> None:
    """Require a teacher for each task, and for a served one the distribution that a server scores."""
    from grpocli.algorithm.kl import EVERY_TASK, KL, key_of_teacher
    from grpocli.tasks.task import tasks_of

    kl = run.algorithm.kl
    if not isinstance(kl, KL) or not kl.has_teacher:
        return
    taught, tasks = {**kl.models, **kl.urls}, list(tasks_of(run.task))
    if EVERY_TASK in taught:
        problem = "is the teacher of every task: give a mapping {task: URL} beside a mapping of models, or one of them"
        require(kl, "base_url", len(taught) == 1, problem)
    else:
        for task, teacher in taught.items():
            if task not in tasks:
                problem = f"this run has no such task, only {', '.join(tasks)}{nearest(task, tasks)}"
                field = "model" if task in kl.models else "base_url"
                raise ConfigError(problem, key=key_of_teacher(field, task), value=teacher)
        for task in tasks:
            problem = f"names no teacher for the task {task}: add {task}: PATH, or give one teacher for all tasks"
            require(kl, "model", task in taught, problem)
    if kl.urls:
        plain = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        why = "with algorithm.kl.base_url: a server scores tokens under the model's own distribution"
        for name, value in plain.items():
            require(run.rollout, name, getattr(run.rollout, name) == value, f"must be {value} {why}")


def _check_difficulty(run: Run) -> None:
    """Require scores of 0 and 1 of the reward that weighs questions."""
    from grpocli.algorithm.question_weight import Difficulty
    from grpocli.rewards.reward import Correctness
    from grpocli.tasks.prompt_source import accuracy_rewards_of

    weight = run.algorithm.question_weight
    if not isinstance(weight, Difficulty):
        return
    for name in [weight.reward] if weight.reward else accuracy_rewards_of(run).values():
        reward = run.reward[name]
        if isinstance(reward, Correctness) and (reward.right, reward.wrong) != (1, 0):
            keys = f"reward.{name}.right=1 and reward.{name}.wrong=0"
            problem = f"difficulty reads an accuracy from it: leave {keys}, or name another reward"
            raise ConfigError(problem, key="algorithm.question_weight.reward", value=name)


def _check_max_rl(run: Run) -> None:
    """Refuse rewards below 0 with MaxRL, which divides by a group's mean score."""
    from grpocli.algorithm.advantage import MaxRL
    from grpocli.rewards.length import KimiLength, LengthPenalty, Overlong
    from grpocli.rewards.reward import Correctness

    if not isinstance(run.algorithm.advantage, MaxRL):
        return
    why = "algorithm/advantage=max_rl needs scores of 0 or more"
    for name, reward in run.reward.items():
        if isinstance(reward, Correctness):
            require(reward, "wrong", reward.wrong >= 0, f"{why}: leave it at 0")
        penalty = isinstance(reward, LengthPenalty) and not reward.only_right  # a right answer's score stays above 0
        if penalty or isinstance(reward, Overlong | KimiLength):
            raise ConfigError(f"{why}, and this one is negative: leave it out", key="reward", value=f"[{name}]")


def _check_curriculum(run: Run) -> None:
    """Require an accuracy reward where pass rates decide what is drawn."""
    from grpocli.rewards.reward import NoReward
    from grpocli.tasks.curriculum import OrderKeys
    from grpocli.tasks.prompt_source import rewards_for
    from grpocli.tasks.task import key_of, tasks_of

    for name, task in tasks_of(run.task).items():
        keys = OrderKeys.of(task)
        scored = [n for n in rewards_for(task, run.reward) if not isinstance(run.reward[n], NoReward)]
        if keys.uses_pass_rates and not scored:
            rests = keys.no_resampling_pass_rate is not None
            field, remedy = ("no_resampling_pass_rate", "") if rests else ("order", ", or give difficulty_column")
            key, value = f"{key_of(run.task, name)}.{field}", getattr(keys, field)
            problem = "needs the pass rates of problems, and no reward scores them"
            raise ConfigError(problem, key=key, value=value, hint=f"choose a reward{remedy}")


def _check_batch(run: Run) -> None:
    """Require a group for each update, and micro-batches that hold whole completions."""
    train, prompts = run.train, run.rollout.prompts_per_step
    problem = f"must be at most rollout.prompts_per_step={prompts}: an update needs a group"
    require(train, "minibatches", train.minibatches <= prompts, problem)
    longest, split = run.rollout.longest_row, run.hardware.context_parallel
    limits = "rollout.max_prompt_tokens + rollout.max_completion_tokens"
    least = f"{limits} = {longest}: a micro-batch holds whole completions"
    if split > 1:
        least = f"({limits}) / hardware.context_parallel = {-(-longest // split)}: a process has this part of a row"
    n, keys = _shared_by(run, -(-longest // train.micro_batch_tokens))
    hint = f"raise it, or let {n} processes share each row: {keys}"
    ok = train.micro_batch_tokens * split >= longest
    require(train, "micro_batch_tokens", ok, f"must be at least {least}", hint)


def _shared_by(run: Run, least: int) -> tuple[int, str]:
    """A number of trainer processes, at least `least`, that may share each row, and the keys that set it.

    It must divide the number of processes, and that of the model's heads, which is not known yet: a power of two often
    does.
    """
    from grpocli.hardware import Single

    processes = run.hardware.processes or 1
    if fitting := [n for n in range(least, processes + 1) if processes % n == 0]:
        return fitting[0], f"hardware.context_parallel={fitting[0]}"
    n = 1 << (least - 1).bit_length()
    if isinstance(run.hardware, Single):
        return n, f"hardware.processes={n} hardware.context_parallel={n}"
    return n, f"hardware.context_parallel={n} on more nodes (hardware.train_nodes)"


def _check_structure(run: Run) -> None:
    """Require a correction with a regex or schema, which restricts the sampler's distribution but not the trainer's."""
    from grpocli.config.user_parts import choice_of
    from grpocli.rollout.fake_engine import Fake
    from grpocli.rollout.transformers_engine import Transformers, check_no_structure

    name = run.rollout.sampling.structure
    if not name:
        return
    engine = run.engine.resolved()
    if isinstance(engine, Transformers | Fake):
        check_no_structure(run.rollout.sampling, choice_of("engine", engine))
    problem = "samples from a part of the policy's distribution: choose algorithm/correction=token_truncate"
    require(run.rollout, name, run.algorithm.has_correction, problem)


def _check_group_fits(run: Run) -> None:
    """Require that vLLM runs a whole group at once, since a group is one request."""
    limit = run.engine.max_num_seqs
    groups = {"rollout.group_size": run.rollout.group_size, "eval.samples": run.eval.samples}
    name = max(groups, key=lambda name: groups[name])
    if limit is not None and limit < groups[name]:
        problem = f"must be at least {name}={groups[name]}, whose completions are one request"
        raise ConfigError(problem, key="engine.vllm_args.max_num_seqs", value=limit)


def _check_waits(run: Run) -> None:
    """Require that processes wait longer for each other than the main process waits for a lost server."""
    from grpocli.algorithm.kl import KL

    if (run.hardware.processes or 1) == 1:
        return
    kl = run.algorithm.kl
    waits: dict[str, float] = {**run.engine.waits}
    if run.callbacks:
        waits["callbacks_timeout"] = run.callbacks_timeout
    if isinstance(kl, KL) and kl.beta and kl.urls:
        waits["algorithm.kl.timeout"] = kl.timeout
    for key, seconds in waits.items():
        problem = f"must be above the {seconds:g} s that the run may wait ({key}): raise it, or lower that"
        require(run.hardware, "timeout", seconds < run.hardware.timeout, problem)


def _check_engine(run: Run) -> None:
    from grpocli.rollout.engine import EnginePart

    if not isinstance(run.engine, EnginePart):
        name = type(run.engine).__name__
        raise ConfigError("must derive from grpocli.rollout.engine.EnginePart", key="engine", value=name)


def check_nodes(run: Run, engine: Any) -> None:
    """Check the engine of a run on several machines. Called again with the engine that engine=auto chooses."""
    from grpocli.config.user_parts import choice_of
    from grpocli.hardware import Multinode
    from grpocli.rollout.vllm.engine_parts import Vllm

    hardware = run.hardware
    if not isinstance(hardware, Multinode):
        return
    if not isinstance(engine, Vllm) or engine.base_url:  # it starts no servers
        given = "has its servers already" if isinstance(engine, Vllm) else "runs in the trainer processes"
        problem = f"engine={choice_of('engine', engine)} {given}: choose engine=vllm without base_url, or 0"
        require(hardware, "rollout_nodes", hardware.rollout_nodes == 0, problem)
        return
    problem = "engine=vllm needs machines for its servers: set at least 1, or choose another engine"
    require(hardware, "rollout_nodes", hardware.rollout_nodes > 0, problem)
    used = engine.replicas * engine.tensor_parallel * engine.data_parallel
    problem = (
        f"must be all GPUs of a machine, hardware.devices_per_node={hardware.devices_per_node}, together with "
        f"engine.tensor_parallel={engine.tensor_parallel} and engine.data_parallel={engine.data_parallel}"
    )
    require(engine, "replicas", hardware.device == "cpu" or used == hardware.devices_per_node, problem)


def check_shares(run: Run, processes: int) -> None:
    """Require a completion for each process. Called again when the GPUs have been counted."""
    groups, size = run.rollout.prompts_per_step // run.train.minibatches, run.rollout.group_size
    problem = (
        f"leaves some of {processes} trainer processes without data: an update has {groups} groups of "
        f"rollout.group_size={size}; raise it, or train in fewer processes"
    )
    require(run.rollout, "prompts_per_step", processes <= groups * size * run.hardware.context_parallel, problem)


def check_context_parallel(run: Run, processes: int | None) -> None:
    """Check `hardware.context_parallel`. processes: of the trainer; None: not counted yet, and this is called again."""
    n, require_n = run.hardware.context_parallel, partial(require, run.hardware, "context_parallel")
    if n == 1:
        return
    parallel = run.hardware.parallel
    require_n(parallel in ("ddp", "fsdp2"), f"works with hardware.parallel=ddp or fsdp2, not with {parallel}")
    require_n(run.train.packed, "splits packed rows: set train.packed=true")
    problem = "needs packed rows, and a repetition penalty needs padded ones: set rollout.repetition_penalty=1"
    require_n(run.rollout.repetition_penalty == 1, problem)
    remedy = f"set hardware.processes={n}, or a multiple of it"
    problem = f"must divide the number of trainer processes, {processes}: {remedy}"
    require_n(processes is None or processes % n == 0, problem)


def check_splits(run: Run, config: Any) -> None:
    """Require a model whose sequences `hardware.context_parallel` can split. config: the model's, of transformers."""
    from grpocli.models.shared_prompt_attention import supports

    hardware, n = run.hardware, run.hardware.context_parallel
    problem = "not every layer of this model is full attention, whose heads can be dealt out: set it to 1"
    require(hardware, "context_parallel", supports(config, run.rollout.longest_row), problem)
    heads = getattr(config.get_text_config(), "num_attention_heads", n)
    if isinstance(heads, int):  # otherwise each layer has its own, and the trial of the model decides
        fits = ", ".join(str(k) for k in range(2, heads + 1) if heads % k == 0)
        problem = f"must divide the {heads} attention heads of this model: {fits}"
        require(hardware, "context_parallel", heads % n == 0, problem)


def _check_parallel(run: Run) -> None:
    """Refuse combinations that sharded weights do not support."""
    from grpocli.config.user_parts import choice_of

    parallel, lora = run.hardware.parallel, run.model.lora.rank > 0
    require_parallel = partial(require, run.hardware, "parallel")
    _check_optimizer(run)
    _check_quantization(run)
    _check_compile(run)
    if parallel not in ("zero3", "fsdp2"):  # returns early, since resolving engine=auto imports torch
        return
    engine = run.engine.resolved()
    if parallel == "fsdp2":
        problem = "engine=vllm is sent LoRA's updates by one process, which must have them whole: take ddp or zero2"
        require_parallel(not (lora and engine.overlaps), problem)
        return
    name = choice_of("engine", engine)
    require_parallel(engine.overlaps, f"engine={name} cannot sample from sharded weights: take engine=vllm, or fsdp2")
    require_parallel(not lora, "LoRA's updates cannot be added to sharded weights: take zero2, fsdp2 or ddp")
    problem = "a sharded reference cannot follow the policy (algorithm.kl.sync_every): take zero2, fsdp2 or ddp"
    require_parallel(run.algorithm.kl.sync_every == 0, problem)


def _check_quantization(run: Run) -> None:
    """Refuse weights of 4 bits without LoRA, as they do not train, and where whole weights are needed."""
    if not getattr(run.model, "quantization", None):
        return
    parallel, require_quantized = run.hardware.parallel, partial(require, run.model, "quantization")
    require_quantized(run.model.lora.rank > 0, "its weights do not train: add model.lora.rank=16")
    require_quantized(parallel == "ddp", f"hardware.parallel={parallel} shards whole weights: take ddp")
    problem = "a moving reference (algorithm.kl.sync_every) is a copy with whole weights: leave one of them out"
    require_quantized(run.algorithm.kl.sync_every == 0, problem)


def _check_compile(run: Run) -> None:
    """Refuse compiled layers that torch cannot see whole."""
    if not run.model.compile:
        return
    parallel, quantization = run.hardware.parallel, run.model.quantization
    problem = f"DeepSpeed's hooks (hardware.parallel={parallel}) would be compiled with the layers: take ddp or fsdp2"
    require(run.model, "compile", parallel not in ("zero2", "zero3"), problem)
    problem = f"torch cannot compile layers of 4 bits (model.quantization={quantization}): set one to its default"
    require(run.model, "compile", quantization is None, problem)


def _check_optimizer(run: Run) -> None:
    """Refuse an optimizer whose state cannot be sharded as hardware.parallel shards it."""
    from grpocli.config.user_parts import choice_of

    parallel, works = run.hardware.parallel, getattr(run.optim, "parallel", None)
    if works is not None and parallel not in works:
        name = choice_of("optim", run.optim)
        raise ConfigError(f"works with hardware.parallel={' or '.join(works)}, not {parallel}", key="optim", value=name)


def check_prefetch(run: Run, engine: EnginePart) -> None:
    """Check prefetching, which needs an engine outside the trainer. Called again with the choice of engine=auto."""
    from grpocli.config.user_parts import choice_of

    rollout, staleness = run.rollout, run.rollout.max_staleness
    if not staleness:
        problem = "no request runs while weights change unless rollout.max_staleness is above 0"
        require(rollout, "in_flight", not rollout.in_flight, problem)
        return
    problem = f"leftover groups would be older than rollout.max_staleness={staleness} when they train: choose discard"
    require(run.algorithm.keep, "surplus", run.algorithm.keep.surplus != "carry", problem)
    name = choice_of("engine", engine)
    problem = f"engine={name} samples with the trainer's own weights or devices, not beside it"
    hint = "choose engine=vllm, or rollout.max_staleness=0"
    require(rollout, "max_staleness", engine.overlaps, problem, hint)
