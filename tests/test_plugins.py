"""Entry points of installed packages, broken ones too."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from grpocli import cli
from grpocli.config.user_code import from_user_code
from grpocli.errors import ConfigError
from grpocli.plugins import load, plugins


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has one more entry point, of a package that is not there."""
    lost = EntryPoint("lost", "no_such_package.command:main", "")

    def with_lost(group: str) -> dict[str, EntryPoint]:
        return {**plugins(group), "lost": lost}

    for module in ("cli", "plugins"):
        monkeypatch.setattr(f"grpocli.{module}.plugins", with_lost)


@pytest.mark.usefixtures("broken")
def test_a_command_that_cannot_be_loaded_is_one_sentence_and_the_others_work() -> None:
    with pytest.raises(ConfigError, match=r"lost = no_such_package\.command:main cannot be loaded.*install"):
        cli.run(["lost"])
    assert "lost          cannot be loaded" in cli.help_text()
    assert "report        write a page" in cli.help_text()


def test_without_entry_points_a_command_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpocli.cli.plugins", lambda group: {})
    with pytest.raises(ConfigError, match="entry points of grpocli are not installed"):
        cli.run(["report"])


def test_the_code_of_a_tool_is_not_the_users() -> None:
    report = load(plugins("grpocli.commands")["report"])
    with pytest.raises(OSError, match="too long") as raised:
        report(["x" * 300])
    assert not from_user_code(raised.value.with_traceback(raised.tb.tb_next))  # without the frame of this test


@pytest.mark.processes
def test_closed_standard_streams_end_no_command() -> None:
    command = f"{sys.executable} -m grpocli --version <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
