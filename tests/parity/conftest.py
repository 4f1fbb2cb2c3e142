"""`make parity` selects the tests here and prints their table; every other run leaves them out and says so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from parity.table import Table

HERE = Path(__file__).parent
TABLE = pytest.StashKey[Table]()
LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()
    config.stash[LEFT_OUT] = 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is in this folder, and leave it out unless `-m` speaks of parity: TRL is installed only for it."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.parity)
    if "parity" not in config.getoption("markexpr"):
        config.stash[LEFT_OUT] = len(ours)
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[LEFT_OUT]:
        terminalreporter.write_line(
            f"{config.stash[LEFT_OUT]} comparisons with TRL were left out: `make parity` runs them, with TRL installed"
        )
    for line in config.stash[TABLE].lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    if find_spec("trl") is None:
        pytest.fail("TRL is not installed here; `make parity` makes an environment that has it")
    return request.config.stash[TABLE]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the little model and TRL's output folder lie."""
    return tmp_path_factory.mktemp("parity")
