"""Fixtures for running grpocli as a user does, on a model that is built in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def with_the_shared_cache(shared_cache: Path) -> Iterator[None]:
    """Model cache of the session, also for runs of module fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPOCLI_CACHE", str(shared_cache))
        yield


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
