"""What ran: rows of facts about a run, from its config, summary and sessions."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from grpocli.runs.metrics import number
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import accuracy_rewards, format_value, incomparable_since
from grpocli.text import counted, format_duration
from grpocli.types import DTYPES
from grpocli_tools.report.curves import Curves

NAMES = {"drgrpo": "Dr. GRPO", "reinforce_pp": "REINFORCE++-baseline", "maxrl": "MaxRL", "adamw": "AdamW"}
"""Names of choices in papers; other algorithms are called by their capitals."""
FROM_DATA = ("hub", "jsonl")
"""Tasks that only their data distinguish."""
UNEQUAL_STEPS = (("order", "difficulty"), ("order", "file"))
"""Keys of a task, with their values, that give some steps easier problems than others."""

Flat = Mapping[str, Any]
"""A config by dotted key."""


def facts(run: SavedRun, curves: Curves) -> list[tuple[str, str]]:
    """(label, value) rows; those that the config does not determine are left out."""
    choices, flat, starts = run.choices, run.flat, [session.step for session in run.sessions[1:]]
    seconds = number(run.outcome.get("seconds")) or math.fsum(value for _, value in curves.series("time/step"))
    tokens = curves.series("num_tokens")
    rows = [
        ("model", _model(choices, flat)),
        ("task", _tasks(choices, run.section("task"))),
        ("rewards", _rewards(run.section("reward"))),
        ("algorithm", _algorithm(run)),
        ("recipe", choices.get("recipe", "")),
        ("sampling", _sampling(flat)),
        ("update", _update(choices, flat)),
        ("evaluation", _evaluation(flat, run.outcome)),
        ("engine", "transformers" if choices.get("engine") == "auto" and _on_cpu(run) else choices.get("engine")),
        ("hardware", _hardware(run)),
        ("seed", format_value(flat["seed"]) if "seed" in flat else ""),
        ("steps", steps_text(curves.last, flat.get("train.steps", "unknown"))),
        ("time", format_duration(float(seconds))),
        ("tokens", f"{tokens[-1][1]:,}" if tokens else ""),
        ("sessions", f"{len(starts) + 1}, resumed after step {', '.join(map(str, starts))}" if starts else ""),
    ]
    return [(label, value) for label, value in rows if value]


def compute_dtype(run: SavedRun) -> str:
    """The dtype that the policy computes in: the config's, otherwise the final model's; `auto` if it is unknown."""
    wanted = str(run.flat.get("model.dtype", "auto"))
    if wanted in DTYPES:
        return wanted
    try:
        saved = json.loads((run.dir.model / "config.json").read_text()).get("dtype")
    except (OSError, ValueError):
        return "auto"
    return saved if saved in DTYPES else "auto"


def steps_text(done: int, asked: Any) -> str:
    """`30 of 60`; `70, train.steps=30` of a run that was resumed with fewer steps than it had."""
    return f"{done:,}, train.steps={asked}" if isinstance(asked, int) and done > asked else f"{done:,} of {asked}"


def sessions(run: SavedRun) -> list[tuple[str, str, str]]:
    """(steps before, start, versions and changes) of each session."""
    found = []
    for one in run.sessions:
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        changes = [f"{key} {format_value(old)} → {format_value(new)}" for key, (old, new) in one.changes.items()]
        text = "; ".join([versions, *changes, *map(str, one.fallback)])
        found.append((f"from step {one.step + 1}", str(one.time), text))
    return found


def what_changed(run: SavedRun) -> dict[str, tuple[int, str]]:
    """`Curves.changed` of a run. Rewards of steps that draw easier or harder problems are never comparable."""
    task = {key: value for key, value in run.flat.items() if key.startswith("task.")}
    keys = [key for key, value in task.items() if (key.rpartition(".")[2], value) in UNEQUAL_STEPS]
    keys += [key for key, value in task.items() if key.endswith(".no_resampling_pass_rate") and value]
    reward = incomparable_since(run.sessions, None)
    if keys:
        reward = sys.maxsize, f"{keys[0]}={format_value(task[keys[0]])} gives them easier or harder problems"
    return {"eval": incomparable_since(run.sessions, accuracy_rewards(run.config)), "reward": reward}


def _name(choice: str) -> str:
    return NAMES.get(choice, choice if choice == "unknown" else choice.upper())


def _model(choices: Mapping[str, str], flat: Flat) -> str:
    name, path = choices.get("model", "unknown"), flat.get("model.path")
    shown = name if not isinstance(path, str) or path == name else path if name == "hf" else f"{name} ({path})"
    dtype, rank = flat.get("model.dtype"), flat.get("model.lora.rank")
    return ", ".join(
        [shown, *([f"LoRA of rank {rank}"] if rank else []), *([f"in {dtype}"] if dtype in DTYPES else [])]
    )


def _tasks(choices: Mapping[str, str], task: Mapping[str, Any]) -> str:
    """The task, or those of a mixture with their shares; with the environment."""
    if task.get("_target_") != "task/mixture":
        name, path = choices.get("task", "unknown"), task.get("path")
        return (f"{name} ({path})" if name in FROM_DATA else name) + _environment(task)
    parts = {name: part for name, part in task.items() if isinstance(part, Mapping)}
    weights = {name: number(part.get("weight", 1)) or 0 for name, part in parts.items()}
    total = sum(weights.values()) or 1
    return ", ".join(f"{name} {weights[name] / total:.0%}{_environment(part)}" for name, part in parts.items())


def _environment(task: Mapping[str, Any]) -> str:
    environment = task.get("environment")
    if not isinstance(environment, Mapping) or not environment.get("name"):
        return ""
    name = str(environment["name"]).rpartition(":")[2]
    return f" (environment {name}, up to {format_value(environment.get('turns'))} turns)"


def _rewards(rewards: Mapping[str, Any]) -> str:
    weights = {name: part.get("weight", 1) if isinstance(part, Mapping) else 1 for name, part in rewards.items()}
    return ", ".join(f"{name} × {format_value(w)}" if w != 1 else name for name, w in weights.items()) or "none"


def _algorithm(run: SavedRun) -> str:
    """The name with the typed keys of the algorithm, which differ from its defaults; its parts without a name."""
    name = run.choices.get("algorithm", "unknown")
    if name == "parts":
        parts = run.section("algorithm").items()
        targets = {kind: str(part.get("_target_", "")) for kind, part in parts if isinstance(part, Mapping)}
        return ", ".join(f"{kind} {target.rpartition('/')[2]}" for kind, target in targets.items()) or "unknown"
    typed = dict(text.lstrip("+").partition("=")[::2] for text in run.overrides)
    start = len("algorithm.")
    changes = [f"{key[start:]}={one}" for key, one in typed.items() if key.startswith(("algorithm.", "algorithm/"))]
    return _name(name) + (f" with {', '.join(changes)}" if changes else "")


def _sampling(flat: Flat) -> str:
    """`32 prompts x 8 completions, temperature 1, up to 32 + 8 tokens`."""
    keys = ("prompts_per_step", "group_size", "temperature", "max_prompt_tokens", "max_completion_tokens")
    if any(f"rollout.{key}" not in flat for key in keys):
        return ""
    prompts, size, temperature, prompt, completion = (format_value(flat[f"rollout.{key}"]) for key in keys)
    usual = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    others = {key: flat.get(f"rollout.{key}", default) for key, default in usual.items()}
    parts = [f"{prompts} prompts × {size} completions, temperature {temperature}"]
    parts += [f"{key} {format_value(value)}" for key, value in others.items() if value != usual[key]]
    parts.append(f"up to {prompt} + {completion} tokens")
    if stale := flat.get("rollout.max_staleness"):
        parts.append(f"up to {stale} versions old")
    return ", ".join(parts)


def _update(choices: Mapping[str, str], flat: Flat) -> str:
    if "optim.lr" not in flat:
        return ""
    name = choices.get("optim", "adamw")
    schedule = flat.get("optim.schedule", "constant")
    shown = f" ({schedule})" if schedule != "constant" else ""
    parts = [f"{NAMES.get(name, name)}, learning rate {format_value(flat['optim.lr'])}{shown}"]
    counts = {noun: flat.get(f"train.{noun}", 1) for noun in ("epochs", "minibatches")}
    parts += [f"{count} {noun}" for noun, count in counts.items() if count != 1]
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
    count = "held-out problems" if problems is None else counted(int(problems), "held-out problem")
    when = f", every {every} steps" if every else ", before and after"
    metric, share = flat.get("eval.stop_at.metric"), flat.get("eval.stop_at.threshold")
    until = f"; {metric} ≥ {format_value(share)} ends the run" if metric else ""
    return f"{count} × {counted(int(flat['eval.samples']), 'sample')}{when}{until}"


def _hardware(run: SavedRun) -> str:
    """`CPU, 1 process`."""
    flat = run.flat
    if "hardware.device" not in flat:
        return ""
    cpu = _on_cpu(run)
    processes, nodes, parallel = (flat.get(f"hardware.{key}") for key in ("processes", "train_nodes", "parallel"))
    count = processes or (1 if cpu else None)
    parts = ["CPU" if cpu else "GPU" if flat["hardware.device"] == "cuda" else "GPU if there is one"]
    parts += [f"{nodes} machines"] if nodes and nodes != 1 else []
    parts += [counted(count, "process") if count else "a process for each GPU"]
    parts += [str(parallel)] if parallel and (count != 1 or nodes) else []
    return ", ".join(parts)


def _on_cpu(run: SavedRun) -> bool:
    """Whether the run computes on the CPU for certain: by its config, or by a torch without CUDA."""
    torch = str(run.sessions[-1].versions.get("torch")) if run.sessions else ""
    return run.flat.get("hardware.device") == "cpu" or torch.endswith("+cpu")
