"""`grpocli explain`: the objective of a run as mathematics, with the key and the value of every symbol."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpocli.cli.hydra_app import composed, parser_of
from grpocli.errors import ConfigError

if TYPE_CHECKING:
    from grpocli.explain.explanation import Explanation

LIKE_VS = ("vs", "versus", "against", "and", "with")
EXAMPLES = """\
It takes what `grpocli train` takes, and trains nothing. `vs` between two lists of overrides prints what differs.

examples
  grpocli explain algorithm=dgpo
  grpocli explain algorithm=grpo algorithm.objective.level=sequence train.minibatches=4
  grpocli explain algorithm=grpo vs algorithm=dapo train.epochs=2
  grpocli explain recipe=dapo-small --markdown > objective.md
  grpocli explain resume=runs/DATE/TIME              the objective of a run that was started
"""


def main(argv: Sequence[str]) -> int:
    """Print the objective, or what differs between two. Returns the exit code; raises ConfigError as train does."""
    args = _parser().parse_intermixed_args(argv)
    sides = _sides(args.overrides)
    shown = [_explained(side, args.config_dir) for side in sides]
    print(_markdown(shown) if args.markdown else _text(shown), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("explain", "[vs ...] [--markdown]", __doc__, EXAMPLES)
    parser.add_argument("--markdown", action="store_true", help="GitHub-flavoured Markdown")
    return parser


def _sides(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of one config, or of the two that `vs` stands between."""
    if other := [word for word in overrides if word.strip(".").lower() in LIKE_VS and word != "vs"]:
        raise ConfigError("write vs between the two lists of overrides", key=other[0])
    sides: list[list[str]] = [[]]
    for word in overrides:
        if word == "vs":
            sides.append([])
        else:
            sides[-1].append(word)
    if len(sides) > 2:
        raise ConfigError(f"compares two configs, and there are {len(sides)}", key="vs")
    return sides


def _explained(overrides: list[str], config_dir: str | None) -> Explanation:
    from grpocli.explain.explanation import explanation
    from grpocli.launch.compose import build_run

    config = composed(overrides, config_dir)
    return explanation(build_run(config), config, overrides)


def _markdown(shown: Sequence[Explanation]) -> str:
    from grpocli.explain.explanation import compared
    from grpocli.explain.render import comparison_markdown, explanation_markdown

    return explanation_markdown(shown[0]) if len(shown) == 1 else comparison_markdown(compared(*shown))


def _text(shown: Sequence[Explanation]) -> str:
    from grpocli.explain.explanation import compared
    from grpocli.explain.render import comparison_text, explanation_text

    return explanation_text(shown[0]) if len(shown) == 1 else comparison_text(compared(*shown))
