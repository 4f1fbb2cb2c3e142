"""What `grpocli from-trl` prints, read again."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpocli.composition.compose import compose
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


@functools.cache
def composed(groups: tuple[str, ...]) -> DictConfig:
    return compose(list(groups))


def assert_composes(overrides: list[str], needs: dict[str, str] | None = None) -> None:
    """Asserts that overrides compose. Overrides of the same groups share a config, into which their keys are set.

    needs: {beginning of a key: the group that has it}, for overrides without a model and a task.
    """
    read = OverridesParser.create().parse_overrides(overrides)
    groups = [text for text, one in zip(overrides, read, strict=True) if "." not in one.key_or_group]
    if not any(text.startswith(("model=", "task=")) for text in groups):
        groups += [group for key, group in (needs or {}).items() if any(text.startswith(key) for text in overrides)]
    config = composed(tuple(groups))  # its values do not matter
    for one in read:
        if "." in one.key_or_group and not one.is_hydra_override():
            OmegaConf.update(
                config, one.key_or_group, one.value(), force_add=one.is_add()
            )  # raises if the key does not exist
