"""What tools that read a config share: overrides as for `grpocli train`, stages, warnings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from grpocli.cli.hydra_app import refuse_options, search_path
from grpocli.composition.compose import compose, register_parts
from grpocli.composition.overrides import from_command_line
from grpocli.composition.resume import Resume
from grpocli.text import clean

if TYPE_CHECKING:
    from grpocli.rewards.reward import BaseReward
    from grpocli.views.view import View


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Any:
    """The options and overrides of a command line. An error for an unknown option names the override to write."""
    refuse_options(argv, parser)
    return parser.parse_intermixed_args(argv)


def composed(overrides: list[str], config_dir: str | None) -> DictConfig:
    """The config that `grpocli train` would run with these overrides, which may include `resume=`."""
    register_parts()
    overrides = from_command_line(overrides)
    resume = Resume.requested(overrides)
    config = compose([*search_path(config_dir), *(resume.overrides(overrides) if resume else overrides)])
    return resume.merged(config) if resume else config


@contextmanager
def stages() -> Iterator[View]:
    """A view of a command's stages, which is gone after the block."""
    from grpocli.views.live_view import status_view

    view = status_view()
    try:
        yield view
    finally:
        view.stop()


def warn_of_rewards(rewards: Iterable[BaseReward]) -> None:
    """Print the warnings of rewards about their settings."""
    for reward in rewards:
        if reward.warning:
            print(f"warning: {clean(reward.warning)}", file=sys.stderr)
