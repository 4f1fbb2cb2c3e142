"""Running grpocli as a user does, on a model that is built in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_CACHE", str(shared_cache))
    monkeypatch.chdir(tmp_path)
