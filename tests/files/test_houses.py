"""The trainer and the tools are two houses: see [tool.importlinter] in pyproject.toml for imports."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

from grpocli.cli import COMMANDS, help_text
from grpocli.plugins import plugins

ROOT = Path(__file__).parents[2]
OF_TOOLS = {"starlette", "uvicorn", "matplotlib", "jinja2"}


def test_the_trainer_names_no_tool() -> None:
    """Not in a string either, by which it could import one."""
    sources = [path for path in (ROOT / "grpocli").rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    assert sources
    assert [str(path) for path in sources if "grpocli_tools" in path.read_text(encoding="utf-8")] == []


def test_the_trainer_imports_no_package_of_tools() -> None:
    code = "import sys, grpocli.training.trainer; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {"grpocli", "torch"} <= imported
    assert imported & (OF_TOOLS | {"grpocli_tools"}) == set()


def test_every_command_has_a_line_of_help_and_a_main() -> None:
    mains = {name: f"grpocli.cli.{place}" for name, (place, _) in COMMANDS.items()}
    mains |= {name: f"{tool.module}:main" for name, tool in plugins("grpocli.commands").items()}
    assert {"train", "report", "plan"} <= mains.keys()
    for name, place in mains.items():
        about = re.search(rf"^  {name} +(.+)$", help_text(), re.MULTILINE)
        assert about, name
        assert len(about[1]) > 15
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
