"""The sessions of a run with the config of each, from the values that resumes have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpocli.composition.overrides import to_text
from grpocli.errors import ConfigError, GrpoError
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import steps_by_session
from grpocli_tools.replay.collection import ReplaySession

ENDLESS = 10**9
"""A step that no run reaches, as the end of the last session."""
HARMLESS = ("engine", "sync", "hardware", "tracker", "checkpoint", "eval", "hub", "resume_fallback", "train.steps")
"""Keys that do not change what a step computes. A schedule of the learning rate makes `train.steps` one that does."""

ConfigSpan = tuple[int, int, dict[str, Any]]
"""First and last step of one config, and the values of keys that later resumes have changed."""


def config_spans(saved: SavedRun) -> list[ConfigSpan]:
    """The spans of a run, in order; the last one has the present config."""
    spans: list[ConfigSpan] = []
    earlier: dict[str, Any] = {}
    for part in reversed(steps_by_session(saved.sessions, ENDLESS)):
        if spans and spans[0][2] == earlier:
            spans[0] = part.first, *spans[0][1:]
        else:
            spans.insert(0, (part.first, part.last, dict(earlier)))
        changes = part.session.changes if part.session else {}
        earlier |= {
            key: old
            for key, (old, _) in changes.items()
            if not any(f"{key}.".startswith(f"{one}.") for one in HARMLESS)
        }
    return spans or [(1, ENDLESS, {})]


def sessions_of(
    saved: SavedRun, session_of: Callable[[Sequence[str], int, int], ReplaySession]
) -> tuple[list[ReplaySession], str]:
    """The sessions whose config is known, in order, and why that of earlier ones is not; empty if all are.

    session_of: composes the session of these overrides, first and last step.
    """
    found: list[ReplaySession] = []
    for first, last, earlier in reversed(config_spans(saved)):
        try:
            found.insert(0, session_of(_overrides(saved, earlier), first, last))
        except GrpoError as error:
            if not found:
                raise
            return found, f"an earlier session had other values of {', '.join(earlier)} ({error})"
    return found, ""


def _overrides(saved: SavedRun, earlier: Mapping[str, Any]) -> list[str]:
    """Overrides that give keys their earlier values. Raises ConfigError for a part, whose own keys are not recorded."""
    for key, value in earlier.items():
        if isinstance(value, Mapping) or any(one.startswith(f"{key}.") for one in saved.flat):
            raise ConfigError("a resume replaced it, and the keys that it had are not recorded", key=key)
    return [f"{key}={to_text(value)}" for key, value in earlier.items()]
