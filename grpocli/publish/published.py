"""Texts of a run that others read, without secrets and folders of this machine; the README of a final model."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from grpocli.config.environment import OVERRIDES, SECRET
from grpocli.config.parts import CLASSES
from grpocli.config.yaml_text import leaves
from grpocli.hub import REPO, hub_path
from grpocli.runs.run_dir import RunDir
from grpocli.runs.saved_run import SavedRun
from grpocli.runs.sessions import Changes, SessionSteps, format_value, steps_by_session
from grpocli.text import CREDENTIALS, masked, replaced
from grpocli.version import __version__

ELSEWHERE = "NOT_PUSHED"
"""Stands for the folder of a file that is neither below the working directory nor below the home folder."""
HIDDEN = "NOT_PUSHED_SECRET"
"""Stands for a secret."""
SHORTEST = 8
"""The shortest secret that is replaced wherever it occurs: shorter ones occur in other words."""
SIGNED = re.compile(rf"(?<=[?&])[\w.-]*(?:{SECRET.pattern}|sig)[\w.-]*=(?P<secret>[^&\s'\"<>]+)", re.IGNORECASE)
"""Matches a parameter of an address that signs it, such as X-Amz-Signature."""
PATH = r"/(?:[^\s/'\",\[\]{}:=]+/)*[^\s/'\",\[\]{}:=]+"
WHOLE = re.compile(rf"(?P<path>{PATH})(:[A-Za-z_]\w*)?")
"""A value that is a path, or FILE.py:NAME."""
TYPED = re.compile(rf"(?<=[=\[,'\"(])(?P<path>{PATH})")
"""A path in an override, such as `reward=[/home/me/rewards.py:score,math]`."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Replaces secrets and local folders in texts."""

    paths: Mapping[str, str]
    """{path: what stands for it}."""
    secrets: Mapping[str, str]
    """{long secret, as texts, JSON and HTML have it: HIDDEN}."""
    patterns: tuple[re.Pattern[str], ...]
    """Each has a group `secret`, which is hidden."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *folders: Path, former: Sequence[Changes] = ()) -> Publisher:
        """For the texts of a run with this config. folders: further ones whose files are shown by name. former: the
        changes of its sessions, which have values that the config no longer has."""
        found = {path: _public(path) for part in (config, *former) for path in _paths(part)}
        found |= {str(folder.absolute()): folder.name for folder in folders}
        found |= {str(folder): shown for folder, shown in ((Path.cwd(), "."), (Path.home(), "~")) if folder.parts[1:]}
        named = set(_secret_values(config, former))
        long = {value for value in (*_secrets(), *(value for _, value in named)) if len(value) >= SHORTEST}
        forms = {form for secret in long for form in (secret, json.dumps(secret)[1:-1], html.escape(secret))}
        short = (  # as the values of their keys
            re.compile(rf"\b{re.escape(key)}['\"]?[=:]\s*['\"]?(?P<secret>{re.escape(value)})(?!\w)")
            for key, value in named
            if value not in long
        )
        return cls(found, dict.fromkeys(forms, HIDDEN), (CREDENTIALS, SIGNED, *short))

    @classmethod
    def of_run(cls, folder: Path) -> Publisher:
        """For the texts of the run in a folder. Raises ConfigError if its config, which has its secrets, is broken."""
        run = SavedRun(folder).check()
        return cls.of(run.config, folder, former=[session.changes for session in run.sessions])

    def __call__(self, text: str) -> str:
        text = replaced(masked(text), self.secrets)
        for pattern in self.patterns:
            text = pattern.sub(_hidden, text)
        return replaced(text, self.paths, r"(?<![\w/.-])", r"(?![\w-])")


def _hidden(found: re.Match[str]) -> str:
    """The matched text with HIDDEN in the place of its secret."""
    start, end = (place - found.start() for place in found.span("secret"))
    return f"{found[0][:start]}{HIDDEN}{found[0][end:]}"


def _secret_values(config: Mapping[str, Any], former: Sequence[Changes]) -> Iterator[tuple[str, str]]:
    """(last word of the key, value) of the texts of a run whose keys are named as secrets.

    Not those that parts of grpocli declare, which are names of variables and files: `reward.judge.api_key`.
    """
    from grpocli.composition.overrides import leaves_of, parse  # which loads Hydra

    declared = set(_declared(config))
    nodes = ({name: node for name, node in config.items() if name != OVERRIDES}, *former)
    overrides = filter(None, map(parse, map(str, config.get(OVERRIDES) or [])))
    for key, value in (*chain(*map(leaves, nodes)), *chain(*map(leaves_of, overrides))):
        words = key.split(".")
        named = [".".join(words[: i + 1]) for i, word in enumerate(words) if SECRET.search(word)]
        if isinstance(value, str) and value and not value.startswith("${") and value != "???" and set(named) - declared:
            yield words[-1], value


def _declared(node: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a config that are fields of parts of grpocli, or names of parts."""
    if isinstance(node, Mapping):
        cls = CLASSES.get(str(node.get("_target_")))
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        for name, value in node.items():
            key = f"{prefix}.{name}".lstrip(".")
            if name in names or (isinstance(value, Mapping) and "_target_" in value):
                yield key
            yield from _declared(value, key)


def _paths(node: Any) -> Iterator[str]:
    """The absolute paths among the values of a config and in its overrides."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == OVERRIDES and isinstance(value, list):
                yield from (found["path"] for text in value for found in TYPED.finditer(str(text)))
            else:
                yield from _paths(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _paths(value)
    elif isinstance(node, str) and (found := WHOLE.fullmatch(node)) and Path(found["path"]).parts[2:]:
        yield found["path"]


def _public(path: str) -> str:
    """A path below the working directory or the home folder, relative to it; the name of any other."""
    for folder, start in ((Path.cwd(), ""), (Path.home(), "~/")):
        if len(folder.parts) > 1 and Path(path).is_relative_to(folder) and Path(path) != folder:
            return f"{start}{Path(path).relative_to(folder)}"
    return f"{ELSEWHERE}/{Path(path).name}"


def _secrets() -> Iterator[str]:
    """The values of environment variables that are named as secrets, and the token of the hub."""
    from huggingface_hub import get_token

    yield from (value for name, value in os.environ.items() if SECRET.search(name))
    yield get_token() or ""


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
        front=_front_matter(run_dir.name, base, _datasets(config.get("task")), choices.get("task", "unknown"), summary),
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
    same: dict[str, Any] = {
        "task_type": "text-generation",
        "dataset_type": task,
        "dataset_name": task,
        "metric_type": "accuracy",
    }
    results = [
        EvalResult(**same, metric_name=f"held-out accuracy, {how}", metric_value=round(float(value), 4))
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
