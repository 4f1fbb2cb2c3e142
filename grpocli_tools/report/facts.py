"""What ran: rows of facts about a run, from its config, summary and sessions."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpocli.runs.metrics import number
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun, saved_choices
from grpocli.runs.sessions import Session, accuracy_rewards, format_value, incomparable_since
from grpocli.text import format_duration
from grpocli.types import DTYPES
from grpocli_tools.report.curves import Curves

NAMES = {
    **{
        name: name.upper()
        for name in ("grpo", "dapo", "dgpo", "gspo", "luspo", "cispo", "sapo", "gmpo", "rloo", "dppo", "opd")
    },
    "drgrpo": "Dr. GRPO",
    "reinforce_pp": "REINFORCE++-baseline",
    "maxrl": "MaxRL",
    "adamw": "AdamW",
}
"""Names of choices in papers."""

FROM_DATA = ("hub", "jsonl")
"""Tasks that only their data distinguish."""

UNEQUAL_STEPS = (("order", "difficulty"), ("order", "file"))
"""Keys of a task, with their values, that give some steps easier problems than others."""

Flat = Mapping[str, Any]
"""A config by dotted key."""


def facts(
    run: Path, config: Mapping[str, Any], flat: Flat, summary: Mapping[str, Any], curves: Curves
) -> list[tuple[str, str]]:
    """(label, value) rows; those that the config does not determine are left out."""
    choices, starts = saved_choices(run, config), session_starts(run)
    rows = [
        ("model", _model(choices, flat)),
        ("task", _tasks(choices, config)),
        ("rewards", _rewards(config)),
        ("algorithm", _algorithm(choices, config)),
        ("recipe", choices.get("recipe", "")),
        ("sampling", _sampling(flat)),
        ("update", _update(choices, flat)),
        ("evaluation", _evaluation(flat, summary)),
        ("engine", _engine(run, choices, flat)),
        ("hardware", _hardware(run, flat)),
        ("seed", format_value(flat["seed"]) if "seed" in flat else ""),
        *_progress(flat, summary, curves),
        ("sessions", f"{len(starts) + 1}, resumed after step {', '.join(map(str, starts))}" if starts else ""),
    ]
    return [(label, value) for label, value in rows if value]


def compute_dtype(run: Path, flat: Flat) -> str:
    """The dtype that the policy computes in: the config's, otherwise the final model's; `auto` if it is unknown."""
    wanted = str(flat.get("model.dtype", "auto"))
    if wanted in DTYPES:
        return wanted
    try:
        saved = json.loads((RunDir(run).model / "config.json").read_text()).get("dtype")
    except (OSError, ValueError):
        return "auto"
    return saved if saved in DTYPES else "auto"


def steps_text(done: int, asked: Any) -> str:
    """`30 of 60`; `70, train.steps=30` of a run that was resumed with fewer steps than it had."""
    return f"{done:,}, train.steps={asked}" if isinstance(asked, int) and done > asked else f"{done:,} of {asked}"


def session_starts(run: Path) -> list[int]:
    """The steps done before each session but the first."""
    return [session.step for session in _sessions(run)[1:]]


def sessions(run: Path) -> list[tuple[str, str, str]]:
    """(steps before, start, versions and changes) of each session."""
    return [(f"from step {session.step + 1}", str(session.time), _session(session)) for session in _sessions(run)]


def what_changed(run: Path, config: Mapping[str, Any], flat: Flat) -> dict[str, tuple[int, str]]:
    """`Curves.changed` of a run. Rewards of steps that draw easier or harder problems are never comparable."""
    keys = [k for k, v in flat.items() if k.startswith("task.") and (k.rpartition(".")[2], v) in UNEQUAL_STEPS]
    keys += [k for k, v in flat.items() if k.startswith("task.") and k.endswith(".no_resampling_pass_rate") and v]
    found = _sessions(run)
    reward = incomparable_since(found, None)
    if keys:
        reward = sys.maxsize, f"{keys[0]}={format_value(flat[keys[0]])} gives them easier or harder problems"
    return {"eval": incomparable_since(found, accuracy_rewards(config)), "reward": reward}


def _sessions(run: Path) -> list[Session]:
    return SavedRun(run).sessions


def _session(session: Session) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in session.versions.items())
    changes = [f"{key} {format_value(old)} → {format_value(new)}" for key, (old, new) in session.changes.items()]
    return "; ".join([versions, *changes, *map(str, session.fallback)])


def _model(choices: Mapping[str, str], flat: Flat) -> str:
    name, path = choices.get("model", "unknown"), flat.get("model.path")
    shown = name if not isinstance(path, str) or path == name else path if name == "hf" else f"{name} ({path})"
    dtype, rank = flat.get("model.dtype"), flat.get("model.lora.rank")
    parts = [shown, f"LoRA of rank {rank}" if rank else "", f"in {dtype}" if dtype in DTYPES else ""]
    return ", ".join(part for part in parts if part)


def _tasks(choices: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """The task, or those of a mixture with their shares; with the environment."""
    task = config.get("task")
    if not isinstance(task, Mapping):
        return choices.get("task", "unknown")
    if task.get("_target_") != "task/mixture":
        name, path = choices.get("task", "unknown"), task.get("path")
        return (f"{name} ({path})" if name in FROM_DATA else name) + _environment(task)
    parts = {name: part for name, part in task.items() if isinstance(part, Mapping)}
    weights = {name: part.get("weight", 1) for name, part in parts.items()}
    total = sum(weight for weight in weights.values() if isinstance(weight, int | float)) or 1
    return ", ".join(
        f"{name} {weights[name] / total:.0%}{_environment(part)}" if isinstance(weights[name], int | float) else name
        for name, part in parts.items()
    )


def _environment(task: Mapping[str, Any]) -> str:
    environment = task.get("environment")
    if not isinstance(environment, Mapping) or not environment.get("name"):
        return ""
    name = str(environment["name"]).rpartition(":")[2]
    return f" (environment {name}, up to {format_value(environment.get('turns'))} turns)"


def _rewards(config: Mapping[str, Any]) -> str:
    weights = {name: part.get("weight", 1) for name, part in (config.get("reward") or {}).items()}
    return ", ".join(f"{name} × {format_value(w)}" if w != 1 else name for name, w in weights.items()) or "none"


def _algorithm(choices: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """The name with the typed keys of the algorithm, which differ from its defaults; its parts without a name."""
    name = choices.get("algorithm", "unknown")
    if name == "parts":
        return _parts(config)
    texts = [str(text).lstrip("+").partition("=") for text in config.get("overrides") or []]
    typed = {key: value for key, _, value in texts if key.startswith(("algorithm.", "algorithm/"))}
    changes = [f"{key[len('algorithm.') :]}={value}" for key, value in typed.items()]
    return f"{NAMES.get(name, name)}" + (f" with {', '.join(changes)}" if changes else "")


def _parts(config: Mapping[str, Any]) -> str:
    """`advantage std, objective clip ...`."""
    parts = (config.get("algorithm") or {}).items()
    targets = {kind: str(part.get("_target_", "")) for kind, part in parts if isinstance(part, Mapping)}
    return ", ".join(f"{kind} {target.rpartition('/')[2]}" for kind, target in targets.items()) or "unknown"


def _sampling(flat: Flat) -> str:
    """`32 prompts x 8 completions, temperature 1, up to 32 + 8 tokens`."""
    keys = ("prompts_per_step", "group_size", "temperature", "max_prompt_tokens", "max_completion_tokens")
    if any(f"rollout.{key}" not in flat for key in keys):
        return ""
    prompts, size, temperature, prompt, completion = (format_value(flat[f"rollout.{key}"]) for key in keys)
    parts = [f"{prompts} prompts × {size} completions, temperature {temperature}"]
    usual = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    parts += [
        f"{key} {format_value(value)}"
        for key, default in usual.items()
        if (value := flat.get(f"rollout.{key}", default)) != default
    ]
    parts.append(f"up to {prompt} + {completion} tokens")
    if stale := flat.get("rollout.max_staleness"):
        parts.append(f"up to {stale} versions old")
    return ", ".join(parts)


def _update(choices: Mapping[str, str], flat: Flat) -> str:
    if "optim.lr" not in flat:
        return ""
    name = choices.get("optim", "adamw")
    parts = [f"{NAMES.get(name, name)}, learning rate {format_value(flat['optim.lr'])}"]
    if (schedule := flat.get("optim.schedule", "constant")) != "constant":
        parts[0] += f" ({schedule})"
    parts += [
        f"{count} {noun}"
        for key, noun in (("train.epochs", "epochs"), ("train.minibatches", "minibatches"))
        if (count := flat.get(key, 1)) != 1
    ]
    if limit := flat.get("optim.max_grad_norm"):
        parts.append(f"gradient norm up to {format_value(limit)}")
    return ", ".join(parts)


def _evaluation(flat: Flat, summary: Mapping[str, Any]) -> str:
    """The problems are those that were evaluated, if the run has recorded their number."""
    problems, every = summary.get("eval/problems", flat.get("eval.problems")), flat.get("eval.every")
    if problems == 0:
        return "none"
    if "eval.samples" not in flat:
        return ""
    count = "held-out problems" if problems is None else f"{problems} held-out problem{'s' if problems != 1 else ''}"
    when = f", every {every} steps" if every else ", before and after"
    samples = flat["eval.samples"]
    metric, share = flat.get("eval.stop_at.metric"), flat.get("eval.stop_at.threshold")
    until = f"; {metric} ≥ {format_value(share)} ends the run" if metric else ""
    return f"{count} × {samples} sample{'s' if samples != 1 else ''}{when}{until}"


def _engine(run: Path, choices: Mapping[str, str], flat: Flat) -> str:
    name = choices.get("engine", "unknown")
    return "transformers" if name == "auto" and _on_cpu(run, flat) else name


def _hardware(run: Path, flat: Flat) -> str:
    """`CPU, 1 process`."""
    if "hardware.device" not in flat:
        return ""
    cpu = _on_cpu(run, flat)
    processes, nodes, parallel = (flat.get(f"hardware.{key}") for key in ("processes", "train_nodes", "parallel"))
    count = processes or (1 if cpu else None)
    parts = ["CPU" if cpu else "GPU" if flat["hardware.device"] == "cuda" else "GPU if there is one"]
    parts += [f"{nodes} machines"] if nodes and nodes != 1 else []
    parts += [f"{count} process{'es' if count != 1 else ''}" if count else "a process for each GPU"]
    parts += [str(parallel)] if parallel and (count != 1 or nodes) else []
    return ", ".join(parts)


def _on_cpu(run: Path, flat: Flat) -> bool:
    """Whether the run computes on the CPU for certain: by its config, or by a torch without CUDA."""
    found = _sessions(run)
    return flat.get("hardware.device") == "cpu" or bool(found and str(found[-1].versions.get("torch")).endswith("+cpu"))


def _progress(flat: Flat, summary: Mapping[str, Any], curves: Curves) -> list[tuple[str, str]]:
    done = curves.steps[-1] if curves.steps else 0
    seconds = number(summary.get("seconds")) or math.fsum(value for _, value in curves.series("time/step"))
    tokens = curves.series("num_tokens")
    return [
        ("steps", steps_text(done, flat.get("train.steps", "unknown"))),
        ("time", format_duration(float(seconds))),
        ("tokens", f"{tokens[-1][1]:,}" if tokens else ""),
    ]
