"""The dataset and the rewards of a TRL script as overrides."""

from __future__ import annotations

import re
from typing import Any

from grpocli.config.user_code import name_of
from grpocli_tools.porting.foreign_names import TRAINER, TRANSLATION
from grpocli_tools.porting.port import MISSING, Port, Unread
from grpocli_tools.porting.script import Data, RewardCall, ScriptSource

FILES = ("json", "csv", "parquet")
BUILT_IN = TRANSLATION["rewards"]
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
    port.set("task.path", path_of(data), "train_dataset", "dataset_name")
    if data.name:
        port.set("task.name", data.name, "dataset_config")
    if data.split:
        port.set("task.split", data.split, "dataset_train_split")
    for name, value in data.others.items():
        port.lack(f"load_dataset({name})", value, "task has no such key")
    scored = any(one.name in BUILT_IN for one in source.rewards if isinstance(one, RewardCall))
    note = "the column of TRL's accuracy_reward" if scored else "rewards get columns by name"
    port.set("task.answer_column", "solution" if scored else None, note=note)
    if data.rest is not None:
        port.check("train_dataset", data.rest, STEPS)
    if isinstance(source.eval_data, Unread):
        port.check("eval_dataset", source.eval_data, f"it is not read; {TRAINER['eval_dataset'].note}")
    elif source.eval_data is not None:
        _set_evaluation(port, source.eval_data, data)


def path_of(data: Data) -> str:
    files = data.files.get((data.split or "train").partition("[")[0]) if isinstance(data.files, dict) else data.files
    first = files[0] if isinstance(files, list) and files else files
    return str(first) if data.path in FILES and first else data.path


def _set_evaluation(port: Port, given: Data, data: Data) -> None:
    port.named.add("eval_dataset")
    other = bool(given.path) and path_of(given) != path_of(data)
    if other:
        port.set("task.eval_path", path_of(given), "eval_dataset")
    if given.split and (other or given.split != data.split):
        port.set("task.eval_split", given.split, "eval_dataset", "dataset_test_split")
    elif given.path and not other:
        port.check("eval_dataset", path_of(given), "it is the training data; task.eval_size=N prompts are held out")


def set_rewards(port: Port, source: ScriptSource, functions: str, weights: Any) -> None:
    """Set the rewards, their weights, and which of them measures accuracy.

    functions: the file of the script's own functions.
    """
    chosen: list[str] = []
    for number, reward in enumerate(source.rewards):
        if isinstance(reward, Unread):
            port.check("reward_funcs", reward, "it is not read; add it to reward=[...] yourself")
            continue
        known = BUILT_IN.get(reward.name) if reward.module.startswith("trl") else None
        chosen.append("model" if reward.path else known or f"{_place(source, reward, functions)}:{reward.name}")
        if reward.path:
            port.set("reward.model.path", reward.path, "reward_model_name_or_path")
        if isinstance(weights, list) and number < len(weights):
            port.set(f"reward.{name_of(chosen[-1])}.weight", weights[number], "reward_weights")
    if not chosen:
        port.set("reward", MISSING, note="no reward is read")
        if not source.rewards:
            port.check("reward_funcs", "", "no reward is read; set reward=[FILE.py:NAME] yourself")
        return
    port.set("reward", chosen, "reward_funcs")
    names = [name_of(one) for one in chosen]
    accuracy = next(filter(ANSWER.search, names), names[0])  # the first by default, and scripts often begin with format
    if len(names) > 1:
        port.set("eval.reward", accuracy, note="accuracy is the share of completions that this one scores 1 or more")
    if not ANSWER.search(accuracy):
        port.check("eval.reward", accuracy, "accuracy is measured by it; set the one that scores right answers 1")


def _place(source: ScriptSource, reward: RewardCall, functions: str) -> str:
    """The file or module of a reward; a file beside the script comes before an installed module."""
    if not reward.module:
        return functions
    beside = source.file.parent.joinpath(*reward.module.split(".")).with_suffix(".py")
    return str(beside) if beside.is_file() else reward.module
