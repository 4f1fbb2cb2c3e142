"""The dataset and the rewards of a TRL script as overrides."""

from __future__ import annotations

import re
from typing import Any

from grpocli.config.user_parts import name_of
from grpocli_tools.porting.source import Data, RewardCall, ScriptSource, Unread
from grpocli_tools.porting.translation import MISSING, Port
from grpocli_tools.porting.trl_names import TRAINER

FILES = ("json", "csv", "parquet")
BUILT_IN = {"accuracy_reward": "math", "think_format_reward": "format", "get_soft_overlong_punishment": "overlong"}
"""TRL's reward functions."""
ANSWER = re.compile("accura|(^|_)acc(_|$)|correct|answer|exact|solution|verif|equation|math|judge", re.IGNORECASE)
"""Names of rewards that score whether an answer is right."""
NOT_READ = (
    "it is not read; set task=hub task.path=OWNER/NAME yourself, or write its rows into a JSONL: "
    "task=jsonl task.path=FILE"
)
STEPS = (
    "what the script does to its rows is not carried over: write task.processor=FILE.py:NAME, a function that returns "
    "the whole row with `prompt`, or write the rows into a JSONL"
)


def set_data(port: Port, source: ScriptSource) -> None:
    """Set the task: where the rows come from, and how a row becomes a prompt."""
    data = source.data
    if not isinstance(data, Data) or not data.path:
        port.set("task", MISSING, note="the dataset is not read")
        port.check("train_dataset", data, NOT_READ)
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
    if any(one.name in BUILT_IN for one in source.rewards if isinstance(one, RewardCall)):
        port.set("task.answer_column", "solution", note="the column of TRL's accuracy_reward")
    else:
        port.set("task.answer_column", None, note="rewards get columns by name")
    if data.rest is not None:
        port.check("train_dataset", data.rest, STEPS)
    _set_evaluation(port, source, data)


def path_of(data: Data) -> str:
    """The folder, file or name on the hub."""
    files = data.files.get((data.split or "train").partition("[")[0]) if isinstance(data.files, dict) else data.files
    first = files[0] if isinstance(files, list) and files else files
    return str(first) if data.path in FILES and first else data.path


def _set_evaluation(port: Port, source: ScriptSource, data: Data) -> None:
    given = source.eval_data
    if given is None:
        return
    if not isinstance(given, Data):
        port.check("eval_dataset", given, f"it is not read; {TRAINER['eval_dataset'].note}")
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


def set_rewards(port: Port, source: ScriptSource, functions: str, weights: Any) -> None:
    """Set the rewards and their weights."""
    chosen: list[str] = []
    names: list[str] = []
    for reward in source.rewards:
        if isinstance(reward, Unread):
            port.check("reward_funcs", reward, "it is not read; add it to reward=[...] yourself")
            names.append("")
            continue
        known = BUILT_IN.get(reward.name) if reward.module.startswith("trl") else None
        chosen.append("model" if reward.path else known or f"{_place(source, reward, functions)}:{reward.name}")
        names.append(name_of(chosen[-1]))
        if reward.path:
            port.set("reward.model.path", reward.path, "reward_model_name_or_path")
    if not chosen:
        port.set("reward", MISSING, note="no reward is read")
        if not source.rewards:
            port.check("reward_funcs", "", "no reward is read; set reward=[FILE.py:NAME] yourself")
        return
    port.set("reward", chosen, "reward_funcs")
    _set_accuracy(port, [name for name in names if name])
    for name, weight in zip(names, weights if isinstance(weights, list) else [], strict=False):
        if name:
            port.set(f"reward.{name}.weight", weight, "reward_weights")


def _set_accuracy(port: Port, names: list[str]) -> None:
    """Say which reward measures accuracy; the first one does by default, and scripts often begin with the format."""
    chosen = next(filter(ANSWER.search, names), names[0])
    if len(names) > 1:
        port.set("eval.reward", chosen, note="accuracy is the share of completions that this one scores 1 or more")
    if not ANSWER.search(chosen):
        port.check("eval.reward", chosen, "accuracy is measured by it; set the one that scores right answers 1")


def _place(source: ScriptSource, reward: RewardCall, functions: str) -> str:
    """The file or module of a reward; a file beside the script comes before an installed module."""
    if not reward.module:
        return functions
    beside = source.file.parent.joinpath(*reward.module.split(".")).with_suffix(".py")
    return str(beside) if beside.is_file() else reward.module
