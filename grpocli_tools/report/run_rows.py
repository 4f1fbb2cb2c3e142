"""The runs below a folder as rows: their settings and results, of unfinished and damaged runs too."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError, GrpoError
from grpocli.runs.metrics import number, read_metrics
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun, run_folders, suggest_run
from grpocli_tools.evaluation.significance import Paired

LAST_STEPS = 10
"""The final reward is the mean over this many steps, because single steps are noisy."""

RESULTS = ("steps", "before", "accuracy", "change", "final reward", "seconds", "exit")
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


def find_runs(folder: Path) -> list[RunRow]:
    """The runs in and below a folder, unfinished and broken ones included.

    Raises ConfigError if the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder{suggest_run(folder)}")
    return [read_run(path) for path in sorted(run_folders(folder))]


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
        summary = SavedRun(run.path).summary
        return Paired.of(*(summary.get(f"eval/accuracy_by_problem{end}", {}) for end in ("_before", "")))
    return None


def _why_incomparable(run: RunDir) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged config does not affect results
        return SavedRun(run.path).incomparable
    return ""


def _settings(path: Path) -> dict[str, Any]:
    run = SavedRun(path)
    rewards = "+".join(run.config.get("reward") or {})
    if "config.yaml is broken" in run.problems:
        raise ValueError("config.yaml is broken")
    return run.choices | ({"reward": rewards} if rewards else {}) | run.flat


def _results(run: RunDir) -> Results:
    try:
        saved = SavedRun(run.path)
        metrics = read_metrics(run.metrics)
        summary = saved.summary
    except (GrpoError, OSError) as error:
        return _no_results(f"unreadable: {error}")
    if any("summary" in one for one in saved.problems):
        return _no_results(f"unreadable: {saved.problems[0]}")
    rewards = [reward for m in metrics[-LAST_STEPS:] if (reward := number(m.get("reward"))) is not None]
    never = "unfinished" if run.config.is_file() else "not started"
    before, after = (number(summary.get(name)) for name in ("eval/accuracy_before", "eval/accuracy"))
    return {
        "steps": metrics[-1]["step"] if metrics else 0,
        "before": before,
        "accuracy": after,
        "change": None if before is None or after is None else after - before,
        "final reward": statistics.mean(rewards) if rewards else None,
        "seconds": number(summary.get("seconds")),
        "exit": "running" if run.is_running() else str(summary.get("exit", never)),
    }


def _no_results(why: str) -> Results:
    return dict.fromkeys(RESULTS) | {"exit": why}


def overridden_keys(run: Path) -> list[str]:
    """The keys given on the command line of a run, in order; config groups as `algorithm/kl`."""
    return [text.lstrip("+~").partition("=")[0].partition("@")[0] for text in SavedRun(run).overrides]
