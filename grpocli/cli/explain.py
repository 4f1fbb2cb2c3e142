"""`grpocli explain`: print the objective of a run as mathematics, with the key and value of each symbol."""

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
It accepts the overrides of `grpocli train`. `vs` between two lists of overrides compares the two objectives.

examples
  grpocli explain algorithm=dgpo
  grpocli explain algorithm=grpo algorithm.objective.level=sequence train.minibatches=4
  grpocli explain algorithm=grpo vs algorithm=dapo train.epochs=2
  grpocli explain recipe=dapo-small --markdown > objective.md
  grpocli explain resume=runs/DATE/TIME              the objective of an existing run
"""


def main(argv: Sequence[str]) -> int:
    """Print an objective or a comparison. Returns the exit code. Raises ConfigError."""
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
    """The overrides of one config, or of two that `vs` separates."""
    if other := [word for word in overrides if word.strip(".").lower() in LIKE_VS and word != "vs"]:
        raise ConfigError("write vs between the two lists of overrides", key=other[0])
    sides: list[list[str]] = [[]]
    for word in overrides:
        if word == "vs":
            sides.append([])
        else:
            sides[-1].append(word)
    if len(sides) > 2:
        raise ConfigError(f"compares two configs, not {len(sides)}", key="vs")
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
