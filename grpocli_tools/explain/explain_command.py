"""`grpocli explain`: print the objective of a run as mathematics; `A vs B` compares two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parser_of

if TYPE_CHECKING:
    from grpocli_tools.explain.entries import Entry
    from grpocli_tools.explain.explanation import Explanation
    from grpocli_tools.explain.keys import ReferenceIndex

LIKE_VS = ("vs", "versus", "against", "and", "with")
EXAMPLES = """\
It accepts the overrides of `grpocli train`. `vs` between two lists of overrides compares the two objectives. A word
without `=` is a key or config group: its meaning, type, default, choices, and its name in TRL and NeMo RL.

examples
  grpocli explain algorithm=dgpo
  grpocli explain algorithm=grpo algorithm.objective.level=sequence train.minibatches=4
  grpocli explain algorithm=grpo vs algorithm=dapo train.epochs=2
  grpocli explain recipe=dapo-small --markdown > objective.md
  grpocli explain resume=runs/DATE/TIME              the objective of an existing run
  grpocli explain train.minibatches algorithm/keep   the reference of a key and of a config group
  grpocli explain --from-trl num_generations         the key for a name of TRL, NeMo RL or verl
"""


def main(argv: Sequence[str]) -> int:
    """Print an objective or a comparison. Returns the exit code. Raises ConfigError."""
    args = _parser().parse_intermixed_args(argv)
    keys = [word for word in args.overrides if _is_key(word)]
    if args.from_trl is not None or (keys and len(keys) == len(args.overrides)):
        from grpocli_tools.explain.entries import entry, foreign_entries

        reference = _reference()
        if args.from_trl is None:
            return _print([entry(reference.find(key)) for key in keys], args)
        words = [args.from_trl, *args.overrides]
        return _print([one for word in words for one in foreign_entries(word, reference)], args)
    if args.json:
        raise ConfigError("is for keys and names", key="--json", hint="grpocli explain train.minibatches --json")
    _refuse_keys_beside_overrides(keys, args.overrides)
    sides = _sides(args.overrides)
    shown = [_explained(side, args.config_dir) for side in sides]
    from grpocli_tools.explain.explanation import compared
    from grpocli_tools.explain.render import (
        comparison_markdown,
        comparison_text,
        explanation_markdown,
        explanation_text,
    )

    if len(shown) == 1:
        print((explanation_markdown if args.markdown else explanation_text)(shown[0]), end="")
    else:
        print((comparison_markdown if args.markdown else comparison_text)(compared(*shown)), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("explain", "[vs ...] [KEY ...] [--from-trl NAME]", __doc__, EXAMPLES)
    parser.add_argument("--markdown", action="store_true", help="GitHub-flavoured Markdown")
    parser.add_argument("--json", action="store_true", help="the reference of keys as JSON")
    parser.add_argument("--from-trl", metavar="NAME", help="the equivalent of a name of TRL, NeMo RL or verl")
    return parser


def _is_key(word: str) -> bool:
    """Whether a word names a key rather than overrides a value: `train.steps`, but not `~reward.math` or `vs`."""
    return "=" not in word and not word.startswith("~") and word.strip(".").lower() not in LIKE_VS


def _reference() -> ReferenceIndex:
    from grpocli.composition.compose import register_parts
    from grpocli.composition.hydra_sources import conf_dir
    from grpocli_tools.explain.keys import ReferenceIndex

    register_parts()
    return ReferenceIndex(Path(conf_dir()))


def _refuse_keys_beside_overrides(keys: Sequence[str], words: Sequence[str]) -> None:
    """Raise ConfigError for keys among overrides; another stray word is reported with the override before it."""
    known = [key for key in keys if _reference().has(key)] if keys else []
    if known:
        other = next(word for word in words if word not in keys)
        hint = f"write `grpocli explain {known[0]}`, or overrides alone for an objective"
        raise ConfigError(f"a key cannot stand beside {other}", key=known[0], hint=hint)


def _print(entries: Sequence[Entry], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([one.as_json() for one in entries], indent=2, ensure_ascii=False))
    else:
        print("\n".join(one.markdown() if args.markdown else one.text() for one in entries), end="")
    return 0


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
    from grpocli.composition.compose import build_run
    from grpocli_tools.explain.explanation import explanation

    config = composed(overrides, config_dir)
    return explanation(build_run(config), config, overrides)
