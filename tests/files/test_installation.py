"""Documented installation commands work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import grpocli

ROOT = Path(grpocli.__file__).parent.parent
PLACES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "recipes/**/*", "conf/**/*.yaml", "grpocli/**/*.py")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_text_installs_from_an_index_and_every_extra_exists() -> None:
    texts = {path: path.read_text() for place in PLACES for path in ROOT.glob(place) if path.is_file()}
    assert len(texts) > 100
    for path, text in texts.items():
        if path.name != "release.md":  # which says when that will work
            assert not re.search(r"pip install ['\"]?grpocli", text), path
        named = re.findall(r"pip install (?:-e )?'\.\[([\w,-]+)\]'", text)
        assert {extra for names in named for extra in names.split(",")} <= PROJECT["optional-dependencies"].keys(), path


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == grpocli.__version__
