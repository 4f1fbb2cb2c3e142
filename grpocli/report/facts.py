"""What ran: rows of facts about a run, from its config, summary and sessions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.report.curves import Curves
from grpocli.tracking.run_dir import RunDir
from grpocli.tracking.runs import saved_choices
from grpocli.tracking.sessions import Session, format_value, read_sessions
from grpocli.tracking.text import format_duration

ROWS = (
    ("hardware", ("hardware.device", "hardware.processes", "hardware.parallel", "hardware.nodes")),
    ("precision", ("model.dtype", "model.lora.rank")),
    ("sampling", ("rollout.prompts_per_step", "rollout.group_size", "rollout.temperature", "rollout.top_p")),
    ("lengths", ("rollout.max_prompt_tokens", "rollout.max_completion_tokens")),
    ("update", ("train.epochs", "train.minibatches", "optim.lr", "optim.schedule", "optim.max_grad_norm")),
    ("evaluation", ("eval.problems", "eval.samples", "eval.every")),
    ("seed", ("seed",)),
)
"""Facts that are config keys with their values."""


def facts(
    run: Path, config: Mapping[str, Any], flat: Mapping[str, Any], summary: Mapping[str, Any], curves: Curves
) -> list[tuple[str, str]]:
    """(label, value) rows. flat: the config by dotted key."""
    choices = saved_choices(run, config)
    path = flat.get("model.path")
    model = choices.get("model", "unknown")
    rows = [
        ("model", f"{model} ({path})" if isinstance(path, str) and path != model else model),
        ("task", choices.get("task", "unknown")),
        ("rewards", _rewards(config)),
        ("algorithm", _algorithm(choices)),
        ("engine", choices.get("engine", "unknown")),
    ]
    for label, keys in ROWS:
        known = [f"{key}={format_value(flat[key])}" for key in keys if key in flat]
        rows += [(label, ", ".join(known))] if known else []
    done = curves.steps[-1] if curves.steps else 0
    rows.append(("steps", f"{done:,} of {flat.get('train.steps', 'unknown')}"))
    seconds = summary.get("seconds") or sum(value for _, value in curves.series("time/step"))
    rows.append(("time", format_duration(float(seconds))))
    if tokens := curves.series("num_tokens"):
        rows.append(("tokens", f"{tokens[-1][1]:,}"))
    return rows


def sessions(run: Path) -> list[tuple[str, str, str]]:
    """(steps before, start, versions and changes) of each session."""
    logging.getLogger("grpocli.tracking.sessions").setLevel(logging.ERROR)  # the page has a note
    return [
        (f"from step {session.step + 1}", session.time, _session(session)) for session in read_sessions(RunDir(run))
    ]


def _session(session: Session) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in session.versions.items())
    changes = [f"{key} {format_value(old)} → {format_value(new)}" for key, (old, new) in session.changes.items()]
    return "; ".join([versions, *changes, *session.fallback])


def _rewards(config: Mapping[str, Any]) -> str:
    rewards = config.get("reward")
    rewards = rewards if isinstance(rewards, Mapping) else {}
    weights = {name: part.get("weight", 1) if isinstance(part, Mapping) else 1 for name, part in rewards.items()}
    return ", ".join(f"{name} (weight {format_value(weight)})" for name, weight in weights.items()) or "none"


def _algorithm(choices: Mapping[str, str]) -> str:
    parts = [
        f"{name.removeprefix('algorithm/')}={part}" for name, part in choices.items() if name.startswith("algorithm/")
    ]
    return f"{choices.get('algorithm', 'unknown')}" + (f" ({', '.join(parts)})" if parts else "")
