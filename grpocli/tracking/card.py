"""The README of a final model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from grpocli.files import regular
from grpocli.tracking.run_dir import RunDir
from grpocli.tracking.runs import saved_choices
from grpocli.tracking.sessions import SessionSteps, format_value, read_sessions, steps_by_session
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

    The card may be published, so it has the names of environment variables, never their values.
    """
    config = yaml.safe_load(regular(run_dir.config).read_text()) or {}
    named = str((config.get("model") or {}).get("path"))
    base = named if "${" in named else base
    choices = saved_choices(run_dir.path, config)
    trained = steps_by_session(read_sessions(run_dir), summary["steps"])
    why = str(summary.get("eval/incomparable", ""))
    return CARD.format(
        front=front_matter(base),
        name=run_dir.name,
        version=__version__,
        base=_base(base, choices),
        algorithm=_in_turn(choices.get("algorithm"), trained),
        task=_code(choices.get("task")),
        rewards=", ".join(_code(name) for name in config.get("reward") or {}) or "none",
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
        config=regular(run_dir.config).read_text().strip(),
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


def _in_turn(last: Any, trained: Sequence[SessionSteps]) -> str:
    """The algorithms of all sessions, in order. last: the algorithm of the last session."""
    names = [last]
    for part in reversed(trained):
        if part.session and "algorithm" in part.session.changes:
            names.insert(0, part.session.changes["algorithm"][0])
    return ", then ".join(map(_code, names))


def front_matter(base: str) -> str:
    """The YAML that the hub reads. `base_model` is left out for a local folder."""
    facts: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpocli", "grpo", "reinforcement-learning"],
    }
    if _on_hub(base):
        facts["base_model"] = base
    text: str = yaml.safe_dump(facts, sort_keys=False)
    return text


def _on_hub(base: str) -> bool:
    return re.fullmatch(r"[\w][\w.-]*/[\w.-]+", base) is not None


def _base(base: str, choices: Mapping[str, str]) -> str:
    name = choices.get("model")
    return _code(base) if _on_hub(base) or not name else f"{_code(name)} ({_code(base)})"


def _code(text: Any) -> str:
    return f"`{text}`" if text else "unknown"


def _share(summary: Mapping[str, Any], key: str) -> str:
    value = summary.get(key)
    return "not measured" if value is None else f"{value:.3f}"
