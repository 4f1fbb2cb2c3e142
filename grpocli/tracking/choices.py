"""What was chosen for a run, read back from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

GROUPS = ("algorithm", "task", "model", "engine", "hardware", "optim", "tracker", "recipe")


def load_yaml(path: Path) -> Any:
    """A YAML file as plain values, interpolations as text. Raises ValueError, naming the file, if it is broken."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(path.read_text(), loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is broken") from error


def chosen(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{group: choice}: as Hydra saved them, else the class that the config instantiates.

    Groups inside groups (`algorithm/kl`) are there only where Hydra's file is.
    """
    saved = run / ".hydra" / "hydra.yaml"
    if saved.is_file():
        found = (load_yaml(saved) or {}).get("hydra", {}).get("runtime", {}).get("choices", {})
        return {
            _group(name): _text(choice)
            for name, choice in found.items()
            if choice is not None and not name.startswith("hydra/")
        }
    targets = {g: config[g].get("_target_") for g in GROUPS if isinstance(config.get(g), Mapping)}
    return {g: str(target).rpartition(".")[2] for g, target in targets.items() if target}


def overridden(run: Path) -> list[str]:
    """The keys given on the command line of a run, in their order; config groups as `algorithm/kl`."""
    saved = run / ".hydra" / "overrides.yaml"
    given = (load_yaml(saved) or []) if saved.is_file() else []
    return [str(text).lstrip("+~").partition("=")[0].partition("@")[0] for text in given]


def _group(name: str) -> str:
    return name.partition("@")[0]


def _text(choice: Any) -> str:
    return "+".join(map(str, choice)) if isinstance(choice, list) else str(choice)
