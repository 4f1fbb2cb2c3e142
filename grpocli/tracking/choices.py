"""What was chosen for a run, read back from its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.config.former_targets import FORMER

GROUPS = ("algorithm", "task", "model", "engine", "hardware", "optim", "tracker", "recipe")


def load_yaml(path: Path) -> Any:
    """A YAML file as plain values, interpolations as text. Raises ValueError, naming the file, if it is broken."""
    try:
        return yaml_text.load(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is broken") from error


def chosen(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{group: choice}: as Hydra saved them, else what the config builds.

    Groups inside groups (`algorithm/kl`) are there only where Hydra's file is, and whole.
    """
    if found := _of_hydra(run / ".hydra" / "hydra.yaml"):
        choices = {
            _group(name): _text(choice)
            for name, choice in found.items()
            if choice is not None and not name.startswith("hydra/")
        }
        return choices | _chosen_later(config, choices)
    targets = {g: config[g].get("_target_") for g in GROUPS if isinstance(config.get(g), Mapping)}
    return {g: str(FORMER.get(str(target), target)).removeprefix(f"{g}/") for g, target in targets.items() if target}


def _of_hydra(file: Path) -> Mapping[str, Any]:
    """The choices in Hydra's file; none where it is missing or damaged."""
    try:
        saved = load_yaml(file) if file.is_file() else None
    except ValueError:
        return {}
    for name in ("hydra", "runtime", "choices"):
        saved = saved.get(name) if isinstance(saved, dict) else None
    return saved if isinstance(saved, dict) else {}


def _chosen_later(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """By a resume: Hydra's file is of the first start, the config's command line of all."""
    given = dict(str(text).split("=", 1) for text in config.get("overrides") or () if "=" in str(text))
    names = {name: re.sub(r"[\[\]'\"\s]", "", choice) for name, choice in given.items() if name in choices}
    return {name: choice.replace(",", "+") for name, choice in names.items()}


def overridden(run: Path) -> list[str]:
    """The keys given on the command line of a run, in their order; config groups as `algorithm/kl`."""
    config, saved = run / "config.yaml", run / ".hydra" / "overrides.yaml"
    given = (load_yaml(config) or {}).get("overrides") if config.is_file() else None
    if given is None:
        given = (load_yaml(saved) or []) if saved.is_file() else []
    return [str(text).lstrip("+~").partition("=")[0].partition("@")[0] for text in given]


def _group(name: str) -> str:
    return name.partition("@")[0]


def _text(choice: Any) -> str:
    return "+".join(map(str, choice)) if isinstance(choice, list) else str(choice)
