"""Comparisons with TRL and other trainers, which `make parity` installs and runs; tables are printed at the end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from parity.table import Table

HERE = Path(__file__).parent
TABLE, PEER_TABLE = pytest.StashKey[Table](), pytest.StashKey[Table]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE], config.stash[PEER_TABLE] = Table("TRL"), Table("other trainers")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.parity)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[TABLE].lines() + config.stash[PEER_TABLE].lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    if find_spec("trl") is None:
        pytest.fail("TRL is not installed here; `make parity` makes an environment that has it")
    return request.config.stash[TABLE]


@pytest.fixture(scope="session")
def peer_table(request: pytest.FixtureRequest) -> Table:
    return request.config.stash[PEER_TABLE]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the little model and TRL's output."""
    return tmp_path_factory.mktemp("parity")
