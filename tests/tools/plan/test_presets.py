"""Every preset of a model composes, names a model on the hub, and stands in docs/models.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from grpocli.composition.hydra_sources import conf_dir
from grpocli_tools.plan.model_size import PUBLIC

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
ROW = re.compile(r"^\| `([\w.-]+)` \| ([\w.-]+/[\w.-]+) \|", re.MULTILINE)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,38}/[A-Za-z0-9][\w.-]{0,95}")
FILES = sorted(path.stem for path in (Path(conf_dir()) / "model").glob("*.yaml"))
PRESETS = [name for name in FILES if name not in ("hf", "tiny")]


def paths() -> dict[str, str]:
    """The hub names in the files of the presets."""
    folder = Path(conf_dir()) / "model"
    found = {name: re.search(r"^path: (\S+)$", (folder / f"{name}.yaml").read_text(), re.MULTILINE) for name in PRESETS}
    return {name: match[1] for name, match in found.items() if match}


def test_the_page_lists_the_presets() -> None:
    assert dict(ROW.findall(PAGE)) == paths()
    assert "| `tiny` |" in PAGE


def test_sizes_are_those_of_presets() -> None:
    assert set(json.loads(PUBLIC.read_text())) == set(paths().values())
