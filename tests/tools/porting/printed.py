"""What `grpocli from-trl` prints, read again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from grpocli_tools.porting.from_trl_command import ported
from grpocli_tools.porting.port import shell_script


def printed(file: Path, text: str | bytes, **options: Any) -> str:
    """The shell script for a file with this text."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return shell_script(ported(file, **options)[0])


def overrides(text: str) -> list[str]:
    """The overrides of a printed script, as the shell reads them."""
    return shlex.split(text.partition("overrides=(")[2].partition("\n)\n")[0], comments=True)


def checks(text: str) -> list[str]:
    """The lines that a reader has to check, without those that stand below every script."""
    said = [line.removeprefix("# check: ") for line in text.splitlines() if line.startswith("# check: ")]
    usual = ("train_rewards.py", "this assumes", "prompts over", "only the")
    return [one for one in said if not one.startswith(usual)]
