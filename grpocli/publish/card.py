"""The README of a final model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpocli.hub import REPO, hub_path
from grpocli.publish.published import Publisher
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import SessionSteps, format_value, steps_by_session
from grpocli.version import __version__

CARD = """\
---
{front}---

# {name}

Trained by reinforcement learning from verifiable rewards with grpocli {version}.

| | |
|---|---|
| started from | {base} |
| algorithm | {algorithm} |
| task | {task} |
| rewards | {rewards} |
| steps | {steps} |
{sessions}| held-out accuracy at temperature 1 | {before} before, {after} after |
| held-out accuracy, greedy | {greedy_before} before, {greedy_after} after |
{incomparable}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH_TO_THIS_FOLDER")
```

{caption}

```yaml
{config}
```
"""


def model_card(run_dir: RunDir, base: str, summary: Mapping[str, Any]) -> str:
    """The README of a run's final model. base: the folder or hub id of the start model.

    The card may be published, so it has the names of environment variables, never their values, and no local folders.
    """
    run = SavedRun(run_dir.path)
    config, choices = run.config, run.choices
    named = str(run.section("model").get("path"))
    base = named if "${" in named else _hub_name(named) or _hub_name(base) or base
    trained = steps_by_session(run.sessions, summary["steps"])
    why = str(summary.get("eval/incomparable", ""))
    return CARD.format(
        front=_front_matter(
            run_dir.name, base, _datasets(config.get("task")), choices.get("task") or "unknown", summary
        ),
        name=run_dir.name,
        version=__version__,
        base=_base(base, choices),
        algorithm=_code(choices.get("algorithm")),
        task=_code(choices.get("task")),
        rewards=", ".join(_code(name) for name in run.section("reward")) or "none",
        steps=summary["steps"],
        sessions="".join(
            f"| steps {part.first} to {part.last} | {_session(part, first=not i)} |\n" for i, part in enumerate(trained)
        ),
        caption="The config of the last steps:" if len(trained) > 1 else "The config that made it:",
        before=_share(summary, "eval/accuracy_before"),
        after=_share(summary, "eval/accuracy"),
        greedy_before=_share(summary, "eval/accuracy_greedy_before"),
        greedy_after=_share(summary, "eval/accuracy_greedy"),
        incomparable=f"\n{why[0].upper()}{why[1:]}.\n" if why else "",
        config=Publisher.of(config, run_dir.path)(run_dir.config.read_text().strip()),
    )


def _session(part: SessionSteps, first: bool) -> str:
    """The start, versions, damaged checkpoints and changed keys of a session."""
    if part.session is None:
        return "in sessions that were not recorded"
    versions = ", ".join(f"{name} {version}" for name, version in part.session.versions.items())
    changes = {} if first else part.session.changes
    changed = "".join(f"; `{key}` {format_value(old)} -> {format_value(new)}" for key, (old, new) in changes.items())
    damaged = "".join(f"; {sentence}" for sentence in part.session.fallback)
    return f"started {part.session.time} with {versions}{damaged}{changed}".replace("|", "\\|")


def _front_matter(name: str, base: str, datasets: Sequence[str], task: str, summary: Mapping[str, Any]) -> str:
    """The YAML that the hub reads. `base_model` is left out for a local folder."""
    from huggingface_hub import EvalResult, ModelCardData

    measured = {"temperature 1": summary.get("eval/accuracy"), "greedy": summary.get("eval/accuracy_greedy")}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=task,
            metric_type="accuracy",
            metric_name=f"held-out accuracy, {how}",
            metric_value=round(float(value), 4),
        )
        for how, value in measured.items()
        if value is not None
    ]
    data = ModelCardData(
        base_model=base if REPO.fullmatch(base) else None,
        datasets=list(datasets) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpocli", "grpo", "reinforcement-learning"],
        model_name=name,
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n"


def _hub_name(name: str) -> str:
    """OWNER/NAME of a model on the hub; empty for a folder."""
    if Path(name).expanduser().exists():
        return ""
    place = hub_path(name, "model.path") if name.startswith("hub:") else None
    return place.repo if place else name if REPO.fullmatch(name) else ""


def _datasets(task: Any) -> list[str]:
    """The data sets on the hub that a task, or the tasks of a mixture, read."""
    if not isinstance(task, Mapping):
        return []
    own = [str(task["path"])] if REPO.fullmatch(str(task.get("path"))) else []
    own = [name for name in own if not Path(name).exists()]
    return list(dict.fromkeys([*own, *(name for part in task.values() for name in _datasets(part))]))


def _base(base: str, choices: Mapping[str, str]) -> str:
    """The start model: its name on the hub, or its choice; a local folder is shown by its name only."""
    name = choices.get("model")
    shown = base if REPO.fullmatch(base) or "${" in base else Path(base).name
    return _code(shown) if REPO.fullmatch(base) or not name else f"{_code(name)} ({_code(shown)})"


def _code(text: Any) -> str:
    return f"`{text}`" if text else "unknown"


def _share(summary: Mapping[str, Any], key: str) -> str:
    value = summary.get(key)
    return "not measured" if value is None else f"{value:.3f}"
