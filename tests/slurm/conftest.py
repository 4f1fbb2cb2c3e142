"""`make test-slurm` selects the tests marked `slurm`, which submit to a real cluster; other runs leave them out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, Unavailable, install

LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slurm" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("slurm")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{config.stash[LEFT_OUT]} tests on a SLURM cluster were left out: `make test-slurm` runs them"
        )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of three nodes. Where there can be none, tests are skipped with the reason, or fail with CI_SLURM=1."""
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
