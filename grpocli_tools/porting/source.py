"""The settings of a foreign config or script as plain values, before they are translated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli_tools.porting.trl_names import ALIASES, LORA_CONFIG, TRAINER, TRL


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is not a literal, such as a call: its text and line."""

    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.text} (line {self.line})"


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function. module: where it is imported from; "" for a function of the script.

    path: a reward model instead of a function.
    """

    name: str
    module: str = ""
    path: str = ""


@dataclass(slots=True)
class Data:
    """A dataset: the arguments of `load_dataset`. others: arguments without a field here.

    rest: what the script does to it, which is not carried over.
    """

    path: str = ""
    name: str | None = None
    split: str | None = None
    files: Any = None
    streaming: bool = False
    others: dict[str, Any] = field(default_factory=dict)
    rest: Unread | None = None


@dataclass(slots=True)
class ScriptSource:
    """What a file sets. settings: {field: value or Unread}, of GRPOConfig and what `trl grpo` reads beside it.

    lora: arguments of LoraConfig; None without one. notes: what a reader must know.
    ignored: arguments of GRPOTrainer and others that are not settings.
    """

    file: Path
    settings: dict[str, Any] = field(default_factory=dict)
    model: str | Unread | None = None
    rewards: list[RewardCall | Unread] = field(default_factory=list)
    data: Data | Unread | None = None
    eval_data: Data | Unread | None = None
    lora: dict[str, Any] | None = None
    ignored: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_script: bool = False


def number_of(value: Any) -> float | None:
    """A value as a number, also of text such as YAML's `1e-6`; None if it is not a finite one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def read_text(file: Path) -> str:
    """The text of a file. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError("there is no such file", key=str(file)) from error
    except IsADirectoryError as error:
        raise ConfigError("is a folder; give a file in it", key=str(file)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 (byte {error.start:,})", key=str(file), hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=str(file)) from error


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping of a YAML or JSON file. Raises ConfigError if it is broken or not a mapping."""
    text = read_text(file)
    try:
        values = json.loads(text) if file.suffix == ".json" else yaml_text.load(text)
    except (ValueError, RecursionError) as error:
        problem = "lists or mappings are nested too deep" if isinstance(error, RecursionError) else str(error)
        hint = "give a YAML, a JSON or a .py file"
        raise ConfigError(f"cannot be read: {problem}", key=str(file), hint=hint) from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"has {kind}, not a mapping of settings", key=str(file))
    return {str(key): value for key, value in values.items()}


def of_mapping(file: Path, values: Mapping[str, Any]) -> ScriptSource:
    """The source of a `trl grpo --config` file. Raises ConfigError if no key of it is known."""
    source = ScriptSource(file)
    known = {name: value for name, value in values.items() if name in TRL}
    if not known:
        close = next((nearest(name, TRL) for name in values if nearest(name, TRL)), "")
        hint = "give the config of `trl grpo --config` or of NeMo RL, or a script with GRPOConfig(...)"
        raise ConfigError(f"has no key of TRL{close}", key=str(file), hint=hint)
    add_arguments(source, values)
    return source


def add_arguments(source: ScriptSource, values: Mapping[str, Any]) -> None:
    """Add settings of a config or a command line; they replace those of the script."""
    for name, value in values.items():
        if name != "reward_model_name_or_path" or RewardCall("model", path=str(value)) not in source.rewards:
            put(source, name, value)


def put(source: ScriptSource, name: str, value: Any) -> None:
    """Store a value where the translation looks for it."""
    if name == "model_name_or_path":
        source.model = str(value)
    elif name == "reward_funcs":
        source.rewards += [_reward(str(one)) for one in (value if isinstance(value, list) else [value])]
    elif name == "reward_model_name_or_path":
        source.rewards.insert(0, RewardCall("model", path=str(value)))
    elif name.startswith("dataset_"):
        _put_data(source, name, value)
    elif name == "datasets" and isinstance(value, list):
        _put_mixture(source, value)
    elif name in TRL or name in TRAINER or name in LORA_CONFIG or name in ALIASES:
        source.settings[name] = value
    else:
        source.ignored[name] = value


def _put_data(source: ScriptSource, name: str, value: Any) -> None:
    data = source.data if isinstance(source.data, Data) else Data(rest=source.data)
    source.data = data
    match name:
        case "dataset_name":
            data.path = str(value)
        case "dataset_config":
            data.name = None if value is None else str(value)
        case "dataset_train_split":
            data.split = str(value)
        case "dataset_test_split":
            source.eval_data = Data(split=str(value))
        case "dataset_streaming":
            data.streaming = bool(value)
        case _:
            source.ignored[name] = value


def _put_mixture(source: ScriptSource, datasets: list[Any]) -> None:
    """The first dataset of a mixture; the others are a note."""
    first = datasets[0] if datasets and isinstance(datasets[0], dict) else {}
    if first.get("path"):
        source.data = Data(str(first["path"]), first.get("name"), first.get("split"), first.get("data_files"))
    if len(datasets) > 1:
        source.notes.append(
            f"the mixture has {len(datasets)} datasets, and this takes the first: task=[A,B] trains on several"
        )


def _reward(name: str) -> RewardCall:
    module, _, function = name.rpartition(".")
    return RewardCall(function, module or "trl.rewards")
