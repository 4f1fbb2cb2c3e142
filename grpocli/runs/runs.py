"""Reading runs from their folders: their settings and results."""

from __future__ import annotations

import difflib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.errors import ConfigError, GrpoError
from grpocli.runs.metrics import number, read_metrics, read_summary
from grpocli.runs.run_dir import RunDir
from grpocli.runs.sessions import why_incomparable
from grpocli.runs.significance import Paired

GROUPS = ("algorithm", "task", "model", "engine", "hardware", "optim", "tracker", "recipe")

LAST_STEPS = 10
"""The final reward is the mean over this many steps, because single steps are noisy."""

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run.

    settings: the choices of config groups (`algorithm`, `algorithm/kl`, `reward`) and every key of its config. typed:
    the keys given on its command line; None if unknown. incomparable: why `before` and `accuracy` cannot be compared.
    paired: their paired test; None if their values by problem were not recorded.
    """

    path: Path
    settings: Mapping[str, Any]
    results: Results
    typed: list[str] | None = field(default=None)
    incomparable: str = ""
    paired: Paired | None = None

    @property
    def done(self) -> bool:
        return bool(self.results["exit"] == "done")

    @property
    def configured(self) -> bool:
        """Whether its config could be read, not only its choices."""
        return "seed" in self.settings


def find_runs(folder: Path, wanted: Callable[[Path], bool] = lambda path: True) -> list[RunRow]:
    """The wanted runs in and below a folder, unfinished and broken ones included.

    Raises ConfigError if the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder{suggest_run(folder)}")
    return [read_run(path) for path in sorted(run_folders(folder)) if wanted(path)]


def check_run(folder: Path, typed: str) -> None:
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


def read_run(path: Path) -> RunRow:
    """The readable part of a run; `exit` names broken files."""
    try:
        settings, typed = _settings(path), overridden_keys(path)
    except ValueError as error:
        return RunRow(path, {}, _no_results(f"unreadable: {error}"))
    except (TypeError, AttributeError, OSError):  # valid YAML, but not the config of a run
        return RunRow(path, {}, _no_results("unreadable: config.yaml is broken"))
    results, incomparable = _results(RunDir(path)), _why_incomparable(RunDir(path))
    if results["change"] is None or not incomparable:
        return RunRow(path, settings, results, typed or None, paired=_paired(RunDir(path)))
    return RunRow(path, settings, results | {"change": None}, typed or None, incomparable)


def _paired(run: RunDir) -> Paired | None:
    with suppress(ValueError, OSError, TypeError, AttributeError):
        summary = read_summary(run.summary)
        return Paired.of(*(summary.get(f"eval/accuracy_by_problem{end}", {}) for end in ("_before", "")))
    return None


def _why_incomparable(run: RunDir) -> str:
    with suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    ):  # a damaged sessions.jsonl does not affect results
        return why_incomparable(run)
    return ""


def _settings(path: Path) -> dict[str, Any]:
    saved = path / "config.yaml"
    config = (load_yaml(saved) if saved.is_file() else None) or {}
    if not isinstance(config, dict):
        raise ValueError("config.yaml is broken")
    rewards = "+".join(config.get("reward") or {})
    choices = saved_choices(path, config)
    config.pop("overrides", None)  # the keys have the same values
    return choices | ({"reward": rewards} if rewards else {}) | flatten(config)


def flatten(node: Any) -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}, without `_target_`."""
    return {key: value for key, value in yaml_text.flat_values(node).items() if key.rpartition(".")[2] != "_target_"}


def _results(run: RunDir) -> Results:
    try:
        metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
        summary = read_summary(run.summary)
    except (GrpoError, ValueError, OSError) as error:
        return _no_results(f"unreadable: {error}")
    rewards = [reward for m in metrics[-LAST_STEPS:] if (reward := number(m.get("reward"))) is not None]
    before, after = (number(summary.get(name)) for name in ("eval/accuracy_before", "eval/accuracy"))
    return {
        "steps": metrics[-1]["step"] if metrics else 0,
        "before": before,
        "accuracy": after,
        "change": None if before is None or after is None else after - before,
        "final reward": statistics.mean(rewards) if rewards else None,
        "seconds": number(summary.get("seconds")),
        "exit": "running" if run.is_running() else _exit(run, summary),
    }


def _exit(run: RunDir, summary: dict[str, Any]) -> str:
    """The outcome of the last session."""
    return str(summary.get("exit", "unfinished" if run.config.is_file() else "not started"))


def _no_results(why: str) -> Results:
    return dict.fromkeys(RESULTS) | {"exit": why}


RESULTS = ("steps", "before", "accuracy", "change", "final reward", "seconds", "exit")


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


def overridden_keys(run: Path) -> list[str]:
    """The keys given on the command line of a run, in order; config groups as `algorithm/kl`."""
    config = run / "config.yaml"
    given = (load_yaml(config) or {}).get("overrides") if config.is_file() else None
    return [str(text).lstrip("+~").partition("=")[0].partition("@")[0] for text in given or ()]


def _group(name: str) -> str:
    return name.partition("@")[0]


def _choice_text(choice: Any) -> str:
    return "+".join(map(str, choice)) if isinstance(choice, list) else str(choice)
