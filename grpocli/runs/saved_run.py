"""A run, read from its folder: the one reader of configs, metrics, sessions, summaries and rollout files."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from grpocli.config import yaml_text
from grpocli.config.schema import StopAt
from grpocli.errors import ConfigError, config_errors
from grpocli.runs.metrics import number, read_lines, read_metrics, read_summary
from grpocli.runs.rollouts import read_rollouts
from grpocli.runs.run_dir import RunDir, step_of
from grpocli.runs.sessions import Session, accuracy_rewards, incomparable_since, read_sessions

T = TypeVar("T")

GROUPS = ("algorithm", "task", "model", "engine", "hardware", "optim", "tracker", "recipe")
KINDS = ("done", "stopped", "failed")
"""The values of `exit_kind` in a summary."""


@dataclass(frozen=True)
class SavedRun:
    """Reads the files of a run once each, when they are asked for.

    A file that is missing is empty. What is broken is left out, with a sentence in `problems`; `check` refuses it.
    """

    path: Path
    """The folder."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each problem of the files read so far."""

    @cached_property
    def dir(self) -> RunDir:
        """The paths and locks of the folder."""
        return RunDir(self.path)

    def check(self) -> SavedRun:
        """This run. Raises ConfigError without a config, or if the config, a line of metrics or the summary is broken.

        A kill may have left a last line without its end, which is no damage.
        """
        check_is_run(self.path, f"RUN {self.path}")
        read = SavedRun(self.path)
        _ = read.config, read.summary
        if read.problems:
            raise ConfigError(read.problems[0], key="RUN", value=self.path)
        read_metrics(self.dir.metrics)
        return self

    def _read(self, name: str, read: Callable[[], T], empty: T) -> T:
        """What `read` returns; `empty`, and a problem, if the file of this name is broken."""
        try:
            return read()
        except (LookupError, OSError, TypeError, ValueError):
            self.problems.append(f"{name} is broken")
            return empty

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config as plain values, with its interpolations as text."""
        if not self.dir.config.is_file():
            self.problems.append("config.yaml is missing")
            return {}
        return self._read("config.yaml", lambda: yaml_text.load_mapping(self.dir.config.read_text()), {})

    def read_config(self, before: bool = False) -> dict[str, Any]:
        """The config. Raises ConfigError if it is broken.

        before: of the run so far, not that of a resume which was killed before its first step.
        """
        file, kinds = self.dir.config_before if before else self.dir.config, (OSError, ValueError)
        with config_errors(*kinds, says="cannot be read: {}", why=yaml_text.reason, key="resume", value=file):
            return yaml_text.load_mapping(file.read_text())

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; empty if it is none."""
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The config by dotted key, without `_target_` and the command line."""
        return yaml_text.flat({name: value for name, value in self.config.items() if name != "overrides"})

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides of all its starts."""
        typed = self.config.get("overrides")
        return [str(text) for text in typed] if isinstance(typed, list) else []

    @cached_property
    def choices(self) -> dict[str, str]:
        """{group: choice}: see `choices_of`."""
        return self.choices_of(self.config)

    def choices_of(self, config: Mapping[str, Any]) -> dict[str, str]:
        """{group: choice}: as Hydra saved them, otherwise from the config's `_target_`.

        Nested groups (`algorithm/kl`) are included only if Hydra's file can be read.
        """
        file = self.path / ".hydra" / "hydra.yaml"
        saved: dict[str, Any] = {}
        if file.is_file():
            saved = self._read(
                "hydra.yaml", lambda: yaml_text.load(file.read_text())["hydra"]["runtime"]["choices"], {}
            )
        if saved:
            choices = {
                name.partition("@")[0]: "+".join(map(str, choice)) if isinstance(choice, list) else str(choice)
                for name, choice in saved.items()
                if choice is not None and not name.startswith("hydra/")
            }
            return choices | _resumed_choices(config, choices)
        targets = {g: config[g].get("_target_") for g in GROUPS if isinstance(config.get(g), Mapping)}
        return {g: str(target).removeprefix(f"{g}/") for g, target in targets.items() if target}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty before the run's first end."""
        return self._read("summary.json", lambda: read_summary(self.dir.summary), {})

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """The summary of the last session; of an earlier one only its evaluation before training."""
        steps, last = self.summary.get("steps"), self.metrics[-1]["step"] if self.metrics else None
        if not isinstance(steps, int) or last in (None, steps):
            return self.summary
        self.problems.append(f"summary.json is of an earlier session, which ended at step {steps}")
        return {name: value for name, value in self.summary.items() if name.endswith("_before")}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, as they are in the file."""
        none: tuple[list[dict[str, Any]], list[int], int] = ([], [], 0)
        rows, broken, torn = self._read("metrics.jsonl", lambda: read_lines(self.dir.metrics), none)
        if torn and not self.dir.is_running():
            self.problems.append(f"metrics.jsonl: line {torn} is incomplete and left out")
        if broken:
            shown = ", ".join(map(str, broken[:5])) + (" ..." if broken[5:] else "")
            self.problems.append(f"metrics.jsonl: {len(broken)} broken lines are left out ({shown})")
        return rows

    @cached_property
    def sessions(self) -> list[Session]:
        """Its starts, in order."""
        none: tuple[list[Session], list[int]] = ([], [])
        sessions, damaged = self._read("sessions.jsonl", lambda: read_sessions(self.dir), none)
        if damaged:
            self.problems.append(f"sessions.jsonl: line {', '.join(map(str, damaged))} cannot be read")
        return sessions

    @cached_property
    def id(self) -> str:
        """The id of the run, which its checkpoints have, too; empty if it was not recorded."""
        return next((session.run for session in self.sessions if session.run), "")

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The inputs of the run so far: of each key, those of the last session that had it."""
        return {key: digest for session in self.sessions for key, digest in session.inputs.items()}

    @cached_property
    def rollout_files(self) -> dict[int, Path]:
        """{step: rollout file}, in order."""
        paths = self.dir.rollouts(0).parent.glob("step_*.parquet")
        return dict(sorted((step_of(path), path) for path in paths if step_of(path) >= 0))

    def rollouts(self, step: int, wanted: Callable[[str], bool] = lambda column: True) -> list[dict[str, Any]]:
        """The rows of a step's rollout file, with the wanted columns. Raises ConfigError if it is broken."""
        return read_rollouts(self.dir.rollouts(step), wanted)

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped`, `failed`, or `unfinished`: killed, or resumed with more steps and killed."""
        if self.dir.is_running():
            return "running"
        cause, kind, steps = (self.outcome.get(name) for name in ("exit", "exit_kind", "steps"))
        asked = self.flat.get("train.steps")
        if cause is None:
            return "unfinished"
        if cause == "done" and not self.ended_early and isinstance(asked, int) and (steps or 0) < asked:
            return "unfinished"
        return str(kind) if kind in KINDS else "done" if cause == "done" else "failed"

    @property
    def finished_steps(self) -> int | None:
        """The number of steps of a finished run; None if it is not finished, or its summary cannot be read."""
        steps = self.summary.get("steps")
        return steps if self.summary.get("exit") == "done" and isinstance(steps, int) else None

    @property
    def ended_early(self) -> str:
        """Why the run is finished before its last step; empty if it is not."""
        metric = self.flat.get("eval.stop_at.metric")
        threshold = number(self.flat.get("eval.stop_at.threshold"))
        known = isinstance(metric, str) and threshold is not None
        early = self.outcome.get("ended_early")
        reason = early.get("callback") if isinstance(early, Mapping) else None
        by_metric = ended_early(self.outcome, StopAt(metric, threshold)) if known else ""
        return by_metric or (reason if isinstance(reason, str) else "")

    @cached_property
    def incomparable(self) -> str:
        """The keys of the evaluation that resumes have changed, so that accuracies before and after do not compare."""
        _, changes = incomparable_since(self.sessions, accuracy_rewards(self.config))
        return f"before and after are of different evaluations: {changes}" if changes else ""


def ended_early(summary: Mapping[str, Any], stop_at: StopAt) -> str:
    """Why a run is finished before its last step; empty if it is not. A resume may have changed `stop_at` since."""
    early = summary.get("ended_early")
    return stop_at.reason({str(early.get("metric")): early.get("value")}) if isinstance(early, Mapping) else ""


def check_is_run(folder: Path, typed: str) -> None:
    """Raise ConfigError, which suggests a run, unless the folder is a run's. typed: `RUN FOLDER` or `resume=FOLDER`."""
    if not RunDir(folder).config.is_file():
        none = "holds no run of grpocli, there is no config.yaml in it"
        raise ConfigError(f"{none if folder.is_dir() else 'there is no such folder'}{suggest_run(folder)}", key=typed)


def suggest_run(folder: Path) -> str:
    """The end of an error message: the run that contains the folder or has a similar name, else the newest."""
    found = (*run_folders(Path("runs")), *(path.parent for path in folder.parent.glob("*/config.yaml")))
    runs = {name: path for path in found for name in (str(path), path.name)}
    around = [path for path in folder.parents if RunDir(path).config.is_file()]
    if close := around or [runs[name] for name in difflib.get_close_matches(str(folder), runs, n=1)]:
        return f'; did you mean "{close[0]}"?'
    newest = max(runs.values(), key=lambda path: path.stat().st_mtime, default=None)
    return f"; the newest run is {newest}" if newest else "; give the folder of a run"


def run_folders(folder: Path) -> Iterator[Path]:
    """The folders of the runs in and below a folder; links are not followed."""
    for here, below, files in os.walk(folder):
        path = Path(here)
        begun = (path / ".hydra" / "overrides.yaml").is_file()
        if begun or ("config.yaml" in files and {"metrics.jsonl", "summary.json"} & {*files}):
            below.clear()  # checkpoints and models are not runs
            yield path
        below[:] = [name for name in below if not name.startswith(".")]


def _resumed_choices(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """The choices that a resume changed: Hydra's file is of the first start, `overrides` of all starts."""
    given = dict(str(text).split("=", 1) for text in config.get("overrides") or () if "=" in str(text))
    names = {name: re.sub(r"[\[\]'\"\s]", "", choice) for name, choice in given.items() if name in choices}
    return {name: choice.replace(",", "+") for name, choice in names.items()}
