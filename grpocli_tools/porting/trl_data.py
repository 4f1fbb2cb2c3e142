"""The dataset and the rewards of a TRL script as overrides."""

from __future__ import annotations

import re
from typing import Any

from grpocli.config.user_parts import name_of
from grpocli_tools.porting.foreign_names import TRAINER
from grpocli_tools.porting.functions_file import PROCESSOR, carried_steps
from grpocli_tools.porting.overrides import MISSING, Port
from grpocli_tools.porting.source import Data, DatasetStep, RewardCall, ScriptSource, Unread

FILES = ("json", "csv", "parquet")
BUILT_IN = {"accuracy_reward": "math", "think_format_reward": "format", "get_soft_overlong_punishment": "overlong"}
"""TRL's reward functions."""
SHAPE = re.compile(
    "format|structure|xml|tags?_|think|reasoning_step|length|brevity|concise|short|overlong|repetition|language|style|penalty"
    "|punish|cosine|(^|_)(fmt|tags?|len|int|digit|soft|strict|count)(_|$)",
    re.IGNORECASE,
)
"""Names of rewards that score a completion's shape rather than its answer."""
ANSWER = re.compile("accura|(^|_)acc(_|$)|correct|answer|exact|solution|verif|equation|math|judge", re.IGNORECASE)
REFERENCE = re.compile("answer|solution|truth|target|label|gold|expected|reference", re.IGNORECASE)
"""Columns with what a completion should give; a reward that reads one of them may judge by it."""
UNPASSED = frozenset(("trainer_state", "log_extra", "log_metric", "environments"))
"""Arguments that only TRL passes to a reward function."""
ADVICE = {
    "filter": f"return loss_multiplier=0 for the others in {PROCESSOR}, or write the kept rows into a JSONL and set "
    "task=jsonl task.path=FILE",
    "select": "task.split=train[:N] takes the first N rows",
    "train_test_split": "task.eval_size=N holds N prompts out",
    "map": "write task.processor=FILE.py:NAME, a function that returns the whole row with `prompt`",
}


def set_data(port: Port, source: ScriptSource, functions: str) -> None:
    """Set the task: where the rows come from, and how a row becomes a prompt."""
    data = source.data
    if not isinstance(data, Data) or not data.path:
        port.set("task", MISSING, note="the dataset is not read")
        port.check(
            "train_dataset",
            data,
            "it is not read; set task=hub task.path=OWNER/NAME yourself, or write its rows into a JSONL: task=jsonl "
            "task.path=FILE",
        )
        _remark_all(port, source.loose)
        return
    port.set("task", "jsonl" if data.path in FILES else "hub", "train_dataset")
    port.set("task.path", path_of(data), "dataset_name" if not source.is_script else "train_dataset")
    if data.name:
        port.set("task.name", data.name, "dataset_config")
    if data.split:
        port.set("task.split", data.split, "dataset_train_split")
    if data.streaming:
        port.set("task.streaming", True, "streaming", "dataset_streaming")
    for name, value in data.others.items():
        port.lack(f"load_dataset({name})", value, "task has no such key")
    carried = carried_steps(data)
    if carried:
        lines = f"{'line' if len(carried) == 1 else 'lines'} {', '.join(str(step.line) for step in carried)}"
        port.set("task.processor", f"{functions}:{PROCESSOR}", note=f"the dataset's steps in {lines}")
    elif any(one.name in BUILT_IN for one in source.rewards if isinstance(one, RewardCall)):
        port.set("task.answer_column", "solution", note="the column of TRL's accuracy_reward")
    else:
        port.set("task.answer_column", None, note="rewards get columns by name")
    _remark_all(port, [step for step in data.steps if step not in carried] + source.loose)
    _set_evaluation(port, source, data)


def path_of(data: Data) -> str:
    """The folder, file or name on the hub."""
    files = data.files.get((data.split or "train").partition("[")[0]) if isinstance(data.files, dict) else data.files
    first = files[0] if isinstance(files, list) and files else files
    return str(first) if data.path in FILES and first else data.path


def _remark_all(port: Port, steps: list[DatasetStep]) -> None:
    for index, step in enumerate(steps):
        chosen = [one.method for one in steps[index:] if one.method in ("select", "take", "skip", "train_test_split")]
        if step.method == "shuffle" and chosen:
            advice = (
                f"it decides which rows {chosen[0]} takes; write these rows into a JSONL: task=jsonl task.path=FILE"
            )
            port.check("train_dataset.shuffle", f"{step.text} (line {step.line})", advice)
        else:
            _remark(port, step, "train_dataset")


def _remark(port: Port, step: DatasetStep, name: str) -> None:
    if step.method in ("shuffle", "with_format", "set_format", "cast"):
        port.skip(f"{name}.{step.method}", step.text, "every epoch has its own order, and rows are plain values")
    else:
        advice = ADVICE.get(step.method, f"do it in {PROCESSOR}, or write the rows into a JSONL")
        port.check(f"{name}.{step.method}", f"{step.text} (line {step.line})", f"it is not carried over; {advice}")


def _set_evaluation(port: Port, source: ScriptSource, data: Data) -> None:
    given = source.eval_data
    if given is None:
        return
    if not isinstance(given, Data):
        port.check("eval_dataset", given, f"it is not read; {TRAINER['eval_dataset'].note}")
        return
    if any(step.method == "train_test_split" for step in given.steps):
        port.check("eval_dataset", "train_test_split(...)", "task.eval_size=N holds N prompts of the training data out")
        return
    other = given.path and path_of(given) != path_of(data)
    if other:
        port.set("task.eval_path", path_of(given), "eval_dataset")
    if given.split and (other or given.split != data.split):
        port.set("task.eval_split", given.split, "eval_dataset", "dataset_test_split")
    elif given.path and not other:
        port.check("eval_dataset", path_of(given), "it is the training data; task.eval_size=N prompts are held out")
    if given.name != data.name and given.path:
        port.check("eval_dataset", given.name, "its configuration differs from the training data's")
    port.named.add("eval_dataset")
    same = [(step.method, step.function) for step in data.steps]
    for step in given.steps:
        if (step.method, step.function) not in same:
            _remark(port, step, "eval_dataset")


def set_rewards(port: Port, source: ScriptSource, functions: str, weights: Any) -> None:
    """Set the rewards and their weights."""
    chosen: list[str] = []
    names: list[str] = []
    reading: set[str] = set()
    for reward in source.rewards:
        if isinstance(reward, Unread):
            port.check("reward_funcs", reward, "it is not read; add it to reward=[...] yourself")
            names.append("")
            continue
        known = BUILT_IN.get(reward.name) if reward.module.startswith("trl") else None
        chosen.append("model" if reward.path else known or f"{_place(source, reward, functions)}:{reward.name}")
        names.append(name_of(chosen[-1]))
        if any(word.isidentifier() and REFERENCE.search(word) for word in reward.words):
            reading.add(names[-1])
        if reward.path:
            port.set("reward.model.path", reward.path, "reward_model_name_or_path")
        for name in sorted(UNPASSED & reward.words):
            port.notes.append(f"{reward.name} reads {name}, which is not given here: its default stands for it")
        for theirs, ours in (("max_completion_len", "max_tokens"), ("soft_punish_cache", "buffer_tokens")):
            if known == "overlong" and isinstance(reward.arguments.get(theirs), int):
                port.set(f"reward.overlong.{ours}", reward.arguments[theirs], theirs)
    if not chosen:
        port.set("reward", MISSING, note="no reward is read")
        if not source.rewards:
            port.check("reward_funcs", "", "no reward is read; set reward=[FILE.py:NAME] yourself")
        return
    port.set("reward", chosen, "reward_funcs")
    _set_accuracy(port, [name for name in names if name], reading)
    for name, weight in zip(names, weights if isinstance(weights, list) else [], strict=False):
        if name:
            port.set(f"reward.{name}.weight", weight, "reward_weights")


def _set_accuracy(port: Port, names: list[str], reading: set[str]) -> None:
    """Say which reward measures accuracy; the first one does by default, and scripts often begin with the format.

    reading: the rewards that read a reference answer. Some do and use only its length, as a zip does.
    """
    judging = [name for name in names if not SHAPE.search(name)] or [name for name in names if name in reading]
    sure = [one for one in judging if ANSWER.search(one)] or [one for one in judging if one in reading]
    chosen = next((one for one in sure if one in reading), (sure or judging or names)[0])
    if len(names) > 1:
        port.set("eval.reward", chosen, note="accuracy is the share of completions that this one scores 1 or more")
    if not judging or (len(judging) > 1 and not ANSWER.search(chosen) and len(sure) != 1):
        advice = (
            "accuracy is measured by it, by the rewards' names and columns; set the one that scores right answers 1"
        )
        port.check("eval.reward", chosen, advice)


def _place(source: ScriptSource, reward: RewardCall, functions: str) -> str:
    """The file or module of a reward; a file beside the script comes before an installed module."""
    if not reward.module:
        return functions
    beside = source.file.parent.joinpath(*reward.module.split(".")).with_suffix(".py")
    return str(beside) if beside.is_file() else reward.module
