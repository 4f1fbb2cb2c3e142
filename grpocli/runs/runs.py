"""Runs by their folders: finding them, and their settings as their files have them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.errors import ConfigError
from grpocli.runs.run_dir import RunDir

GROUPS = ("algorithm", "task", "model", "engine", "hardware", "optim", "tracker", "recipe")


def check_is_run(folder: Path, typed: str) -> None:
    """Raise ConfigError, which suggests a run, unless the folder is a run's.

    typed: `RUN FOLDER` or `resume=FOLDER`.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no such folder{suggest_run(folder)}", key=typed)
    if not RunDir(folder).config.is_file():
        problem = f"holds no run of grpocli, there is no config.yaml in it{suggest_run(folder)}"
        raise ConfigError(problem, key=typed)


def suggest_run(folder: Path) -> str:
    """The end of an error message: a suggestion of a run.

    It is the run that contains the folder, else one below it or of a similar name, else the newest.
    """
    near = (path.parent for at in (folder, folder.parent) for path in at.glob("*/config.yaml"))
    runs = {*run_folders(Path("runs")), *near}
    names = {name: path for path in runs for name in (str(path), path.name)}
    below = {path for path in runs if path.is_relative_to(folder)}
    close = [] if below else [names[name] for name in difflib.get_close_matches(str(folder), names, n=1)]
    if around := [path for path in folder.parents if RunDir(path).config.is_file()] or close:
        return f'; did you mean "{around[0]}"?'
    newest = max(below or runs, key=lambda path: path.stat().st_mtime, default=None)
    return f"; the newest run is {newest}" if newest else "; give the folder of a run"


def run_folders(folder: Path) -> Iterator[Path]:
    """The folders of the runs in and below a folder; links are not followed."""
    for here, below, files in os.walk(folder):
        path = Path(here)
        if _is_run(path, files):
            below.clear()  # checkpoints and models are not runs
            yield path
        below[:] = [name for name in below if not name.startswith(".")]


def _is_run(path: Path, files: list[str]) -> bool:
    begun = (path / ".hydra" / "overrides.yaml").is_file()
    return begun or ("config.yaml" in files and bool({"metrics.jsonl", "summary.json"} & set(files)))


def load_yaml(path: Path) -> Any:
    """A YAML file as plain values, interpolations as text. Raises ValueError, naming the file, if it is broken."""
    try:
        return yaml_text.load(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is broken") from error


def saved_choices(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{group: choice}: as Hydra saved them, otherwise from the config's `_target_`.

    Nested groups (`algorithm/kl`) are included only if Hydra's file can be read.
    """
    if saved := _hydra_choices(run / ".hydra" / "hydra.yaml"):
        choices = {
            _group(name): _choice_text(choice)
            for name, choice in saved.items()
            if choice is not None and not name.startswith("hydra/")
        }
        return choices | _resumed_choices(config, choices)
    targets = {g: config[g].get("_target_") for g in GROUPS if isinstance(config.get(g), Mapping)}
    return {g: str(target).removeprefix(f"{g}/") for g, target in targets.items() if target}


def _hydra_choices(file: Path) -> Mapping[str, Any]:
    """The choices in Hydra's file; empty if it is missing or damaged."""
    try:
        saved = load_yaml(file) if file.is_file() else None
    except ValueError:
        return {}
    for name in ("hydra", "runtime", "choices"):
        saved = saved.get(name) if isinstance(saved, dict) else None
    return saved if isinstance(saved, dict) else {}


def _resumed_choices(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """The choices that a resume changed: Hydra's file is of the first start, `overrides` of all starts."""
    given = dict(str(text).split("=", 1) for text in config.get("overrides") or () if "=" in str(text))
    names = {name: re.sub(r"[\[\]'\"\s]", "", choice) for name, choice in given.items() if name in choices}
    return {name: choice.replace(",", "+") for name, choice in names.items()}


def _group(name: str) -> str:
    return name.partition("@")[0]


def _choice_text(choice: Any) -> str:
    return "+".join(map(str, choice)) if isinstance(choice, list) else str(choice)
