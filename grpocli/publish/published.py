"""Texts of a run that others read, without secrets and the home folder; the README of a final model."""

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
from grpocli.runs.sessions import Changes
from grpocli.text import CREDENTIALS, SHORTEST, masked, replaced
from grpocli.version import __version__

HIDDEN = "NOT_PUSHED_SECRET"
"""Stands for a secret."""
SIGNED = re.compile(rf"(?<=[?&])[\w.-]*(?:{SECRET.pattern}|sig)[\w.-]*=(?P<secret>[^&\s'\"<>]+)", re.IGNORECASE)
"""Matches a parameter of an address that signs it, such as X-Amz-Signature."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Replaces secrets and folders of this user in texts."""

    folders: Mapping[str, str]
    """{folder: what stands for it}."""
    secrets: Mapping[str, str]
    """{secret, as texts, JSON and HTML have it: HIDDEN}."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *folders: Path, former: Sequence[Changes] = ()) -> Publisher:
        """For the texts of a run with this config.

        folders: of the run, shown by name. former: the changes of its sessions, with values that the config no longer
        has.
        """
        from huggingface_hub import get_token

        shown = {str(folder.absolute()): folder.name for folder in folders}
        shown |= {str(folder): short for folder, short in ((Path.cwd(), "."), (Path.home(), "~")) if folder.parts[1:]}
        named = (value for name, value in os.environ.items() if SECRET.search(name))
        secrets = (*named, get_token() or "", *_secret_values(config, former))
        long = {secret for secret in secrets if len(secret) >= SHORTEST}
        forms = {form for secret in long for form in (secret, json.dumps(secret)[1:-1], html.escape(secret))}
        return cls(shown, dict.fromkeys(forms, HIDDEN))

    @classmethod
    def of_run(cls, folder: Path) -> Publisher:
        """For the texts of the run in a folder. Raises ConfigError if its config, which has its secrets, is broken."""
        run = SavedRun(folder).check()
        return cls.of(run.config, folder, former=[session.changes for session in run.sessions])

    def __call__(self, text: str) -> str:
        text = replaced(masked(text), self.secrets)
        text = SIGNED.sub(lambda found: f"{found[0].removesuffix(found['secret'])}{HIDDEN}", text)
        text = CREDENTIALS.sub(f"//{HIDDEN}@", text)
        return replaced(text, self.folders, r"(?<![\w/.-])", r"(?![\w-])")


def _secret_values(config: Mapping[str, Any], former: Sequence[Changes]) -> Iterator[str]:
    """The texts of a run whose keys are named as secrets.

    Not those that parts of grpocli declare, which are names of variables and files: `reward.judge.api_key`.
    """
    from grpocli.composition.overrides import leaves_of, parse  # which loads Hydra

    declared = set(_declared(config))
    nodes = ({name: node for name, node in config.items() if name != OVERRIDES}, *former)
    overrides = filter(None, map(parse, map(str, config.get(OVERRIDES) or [])))
    for key, value in (*chain(*map(leaves, nodes)), *chain(*map(leaves_of, overrides))):
        words = key.split(".")
        named = {".".join(words[: i + 1]) for i, word in enumerate(words) if SECRET.search(word)}
        if isinstance(value, str) and not value.startswith("${") and named - declared:
            yield value


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


HERE = "PATH_TO_THIS_FOLDER"
"""Stands in the model card for the model's folder."""
CARD = f"""\
---
{{front}}
---

# {{name}}

Trained by reinforcement learning from verifiable rewards with grpocli {__version__}.

| | |
|---|---|
{{rows}}
{{incomparable}}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{HERE}")
tokenizer = AutoTokenizer.from_pretrained("{HERE}")
```

The config of the last steps:

```yaml
{{config}}
```
"""


def model_card(run_dir: RunDir, base: str, summary: Mapping[str, Any]) -> str:
    """The README of a run's final model. base: the folder or hub id of the start model.

    The card may be published, so it has names of environment variables, never their values, and not the home folder.
    """
    run = SavedRun(run_dir.path)
    choices, named = run.choices, str(run.section("model").get("path"))
    base = named if "${" in named else _hub_name(named) or _hub_name(base) or Path(base).name
    known = REPO.fullmatch(base) is not None
    why = str(summary.get("eval/incomparable", ""))
    rows = {
        "started from": f"`{base}`" if known or "model" not in choices else f"`{choices['model']}` (`{base}`)",
        "algorithm": f"`{choices.get('algorithm', 'unknown')}`",
        "task": f"`{choices.get('task', 'unknown')}`",
        "rewards": ", ".join(f"`{name}`" for name in run.section("reward")) or "none",
        "steps": summary["steps"],
        "held-out accuracy at temperature 1": _change(summary, "eval/accuracy"),
        "held-out accuracy, greedy": _change(summary, "eval/accuracy_greedy"),
    }
    return CARD.format(
        front=_front_matter(run, base if known else None, summary),
        name=run_dir.name,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        incomparable=f"\n{why[0].upper()}{why[1:]}.\n" if why else "",
        config=Publisher.of(run.config, run_dir.path)(run_dir.config.read_text().strip()),
    )


def _change(summary: Mapping[str, Any], key: str) -> str:
    values = [summary.get(name) for name in (f"{key}_before", key)]
    before, after = ("not measured" if value is None else f"{value:.3f}" for value in values)
    return f"{before} before, {after} after"


def _front_matter(run: SavedRun, base: str | None, summary: Mapping[str, Any]) -> str:
    """The YAML that the hub reads. base: the name of the start model on the hub; None for a local folder."""
    from huggingface_hub import EvalResult, ModelCardData

    task = run.choices.get("task", "unknown")
    paths = [str(path) for key, path in run.flat.items() if key.startswith("task.") and key.endswith(".path")]
    datasets = [path for path in dict.fromkeys(paths) if REPO.fullmatch(path) and not Path(path).exists()]
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
        base_model=base,
        datasets=datasets or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpocli", "grpo", "reinforcement-learning"],
        model_name=run.dir.name,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _hub_name(name: str) -> str:
    """OWNER/NAME of a model on the hub; empty for a folder."""
    if Path(name).expanduser().exists():
        return ""
    place = hub_path(name, "model.path") if name.startswith("hub:") else None
    return place.repo if place else name if REPO.fullmatch(name) else ""
