"""The settings of a foreign config or script as plain values, before they are translated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli_tools.porting.foreign_names import ALIASES, LORA_CONFIG, TRAINER, TRL
from grpocli_tools.porting.port import Unread


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function, or a reward model."""

    name: str
    module: str = ""
    """Where it is imported from; "" for a function of the script."""
    path: str = ""
    """The reward model."""


@dataclass(slots=True)
class Data:
    """A dataset: the arguments of `load_dataset`."""

    path: str = ""
    name: str | None = None
    split: str | None = None
    files: Any = None
    streaming: bool = False
    others: dict[str, Any] = field(default_factory=dict)
    """Arguments without a field here."""
    rest: Unread | None = None
    """What the script does to it, which is not carried over."""


@dataclass(slots=True)
class ScriptSource:
    """What a file sets."""

    file: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """{field: value or Unread} of GRPOConfig and what `trl grpo` reads beside it."""
    model: str | Unread | None = None
    rewards: list[RewardCall | Unread] = field(default_factory=list)
    data: Data | Unread | None = None
    eval_data: Data | Unread | None = None
    lora: dict[str, Any] | None = None
    """Arguments of LoraConfig."""
    ignored: dict[str, Any] = field(default_factory=dict)
    """Arguments of GRPOTrainer and others that are not settings."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know."""


def read_text(file: Path) -> str:
    """The text of a file. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 (byte {error.start:,})", key=str(file), hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=str(file)) from error


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping of a YAML or JSON file. Raises ConfigError if it is broken or not a mapping."""
    text = read_text(file)
    try:
        values = json.loads(text) if file.suffix in (".json", ".ipynb") else yaml_text.load(text)
    except (ValueError, RecursionError) as error:
        hint = "give a YAML, a JSON or a .py file"
        raise ConfigError(f"cannot be read: {error}", key=str(file), hint=hint) from error
    if not isinstance(values, dict):
        raise ConfigError(f"is a {type(values).__name__}, not a mapping of settings", key=str(file))
    return {str(key): value for key, value in values.items()}


def of_mapping(file: Path, values: Mapping[str, Any]) -> ScriptSource:
    """The source of a `trl grpo --config` file. Raises ConfigError if no key of it is known."""
    if not TRL.keys() & values.keys():
        close = next((nearest(name, TRL) for name in values if nearest(name, TRL)), "")
        hint = "give the config of `trl grpo --config` or of NeMo RL, or a script with GRPOConfig(...)"
        raise ConfigError(f"has no key of TRL{close}", key=str(file), hint=hint)
    source = ScriptSource(file)
    for name, value in values.items():
        put(source, name, value)
    return source


def put(source: ScriptSource, name: str, value: Any) -> None:
    """Store a value of a config or a command line where the translation looks for it."""
    data = source.data if isinstance(source.data, Data) else Data(rest=source.data)
    match name:
        case "model_name_or_path":
            source.model = value if isinstance(value, Unread) else str(value)
        case "reward_funcs":
            names = [str(one).rpartition(".") for one in (value if isinstance(value, list) else [value])]
            source.rewards += [RewardCall(function, module or "trl.rewards") for module, _, function in names]
        case "reward_model_name_or_path":
            source.rewards.insert(0, RewardCall("model", path=str(value)))
        case "dataset_name":
            source.data, data.path = data, str(value)
        case "dataset_config":
            source.data, data.name = data, None if value is None else str(value)
        case "dataset_train_split":
            source.data, data.split = data, str(value)
        case "dataset_test_split":
            source.eval_data = Data(split=str(value))
        case "dataset_streaming":
            source.data, data.streaming = data, bool(value)
        case "datasets" if isinstance(value, list) and value and isinstance(value[0], dict):
            first = value[0]
            source.data = Data(
                str(first.get("path", "")), first.get("name"), first.get("split"), first.get("data_files")
            )
            if len(value) > 1:
                note = f"the mixture has {len(value)} datasets, and this takes the first"
                source.notes.append(f"{note}: task=[A,B] trains on several")
        case _ if name in TRL or name in TRAINER or name in LORA_CONFIG or name in ALIASES:
            source.settings[name] = value
        case _:
            source.ignored[name] = value
