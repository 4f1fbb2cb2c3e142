"""The command line of tools that read a config: options, and overrides as for `grpocli train`."""

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


class Parser(argparse.ArgumentParser):
    """An argument parser whose error for an unknown option names the override to write instead."""

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        refuse_options(sys.argv[1:] if args is None else args, self)
        return super().parse_intermixed_args(args, namespace)


def parser_of(command: str, usage: str, doc: str | None, examples: str) -> argparse.ArgumentParser:
    """A parser with `.overrides` and `.config_dir`. doc: the module's docstring, "`grpocli NAME`: TEXT"."""
    parser = Parser(
        prog=f"grpocli {command}",
        usage=f"grpocli {command} [GROUP=CHOICE ...] [KEY=VALUE ...] {usage}",
        description=_sentence(doc),
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for `grpocli train`")
    parser.add_argument(
        "--config-dir", "-cd", metavar="DIR", help="a folder with config groups and recipes of your own"
    )
    return parser


def whole_number(text: str) -> int:
    """The type of an option that is 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return number


def _sentence(doc: str | None) -> str:
    """The docstring of a command's module without the command's name."""
    text = (doc or "").partition(": ")[2]
    return text[:1].upper() + text[1:]


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
