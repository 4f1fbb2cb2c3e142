"""The sessions of a run with the config of each, from the values that resumes have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpocli.composition.overrides import to_text
from grpocli.errors import ConfigError, GrpoError
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import steps_by_session

if TYPE_CHECKING:
    from grpocli_tools.replay.source import ReplaySession

ENDLESS = 10**9
"""A step that no run reaches, as the end of the last session."""
HARMLESS = ("engine", "sync", "hardware", "tracker", "checkpoint", "eval", "hub", "resume_fallback", "train.steps")
"""Keys that do not change what a step computes. A schedule of the learning rate makes `train.steps` one that does."""


@dataclass(frozen=True, slots=True)
class ConfigSpan:
    """Consecutive steps of one config. earlier: the values of keys that later resumes have changed."""

    first: int
    last: int
    earlier: Mapping[str, Any]


def config_spans(run_dir: RunDir) -> list[ConfigSpan]:
    """The spans of a run, in order; the last one has the present config."""
    spans: list[ConfigSpan] = []
    earlier: dict[str, Any] = {}
    for part in reversed(steps_by_session(SavedRun(run_dir.path).sessions, ENDLESS)):
        if spans and spans[0].earlier == earlier:
            spans[0] = replace(spans[0], first=part.first)
        else:
            spans.insert(0, ConfigSpan(part.first, part.last, dict(earlier)))
        changes = part.session.changes if part.session else {}
        earlier |= {key: old for key, (old, _) in changes.items() if not _is_harmless(key)}
    return spans or [ConfigSpan(1, ENDLESS, {})]


def sessions_of(
    run_dir: RunDir, session_of: Callable[[Sequence[str], int, int], ReplaySession]
) -> tuple[list[ReplaySession], str]:
    """The sessions whose config is known, in order, and why that of earlier ones is not; empty if all are.

    session_of: composes the session of these overrides, first and last step.
    """
    found: list[ReplaySession] = []
    for span in reversed(config_spans(run_dir)):
        try:
            found.insert(0, session_of(_overrides(run_dir, span.earlier), span.first, span.last))
        except GrpoError as error:
            if not found:
                raise
            return found, f"an earlier session had other values of {', '.join(span.earlier)} ({error})"
    return found, ""


def _is_harmless(key: str) -> bool:
    return f"{key}.".startswith(tuple(f"{one}." for one in HARMLESS))


def _overrides(run_dir: RunDir, earlier: Mapping[str, Any]) -> list[str]:
    """Overrides that give keys their earlier values. Raises ConfigError for a part, whose own keys are not recorded."""
    if not earlier:
        return []
    now = SavedRun(run_dir.path).config
    for key, value in earlier.items():
        if isinstance(value, Mapping) or isinstance(_at(now, key), Mapping):
            raise ConfigError("a resume replaced it, and the keys that it had are not recorded", key=key)
    return [f"{key}={to_text(value)}" for key, value in earlier.items()]


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
