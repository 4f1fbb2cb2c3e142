"""A SLURM cluster on this machine, for the tests marked `slurm`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, Unavailable, install


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of three nodes.

    Without one, tests are skipped with the reason, or fail with CI_SLURM=1.
    """
    cluster = Cluster()
    try:
        install()
        cluster.start()
    except Unavailable as error:
        cluster.stop()
        if os.environ.get("CI_SLURM") == "1":
            pytest.fail(f"CI_SLURM=1, and there is no SLURM cluster: {error}")
        pytest.skip(f"no SLURM cluster: {error}")
    yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPOCLI_CACHE", str(shared_cache))
    monkeypatch.chdir(tmp_path)
