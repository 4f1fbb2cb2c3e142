"""`grpocli report`: a page about runs as one HTML file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError

EXAMPLES = """\
examples
  grpocli report runs/DATE/TIME                   one run: curves, warnings, completions
  grpocli report multirun/DATE/TIME               a sweep: curves over seeds, results, differences
  grpocli report RUN RUN --out compared.html
"""


PLAIN_REWARD = "grpocli.rewards.reward.BaseReward"


def main(argv: Sequence[str]) -> int:
    """Write the page. Returns the exit code. Raises ConfigError for a folder without runs or a file that fails."""
    args = _parser().parse_args(argv)
    if args.completions is not None and args.completions < 0:
        raise ConfigError("must be 0 or more", key="--completions", value=args.completions)
    out = args.out or args.folders[0] / "report.html"
    _check_writable(out, args.folders)
    from grpocli.files import write_atomic
    from grpocli.report.build import Builder
    from grpocli.report.html import page_html
    from grpocli.tracking.text import clean

    data = Builder(formula_lines_of, args.completions, _progress).page(args.folders)
    html = page_html(data)
    try:
        write_atomic(out, html)
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error
    print(clean(str(out)))
    return 0


def formula_lines_of(run: Path) -> list[str]:
    """The objective of a run as `grpocli explain resume=RUN` prints it."""
    from omegaconf import OmegaConf

    from grpocli.config.build import build
    from grpocli.explain.explanation import explanation
    from grpocli.explain.render import formula_lines
    from grpocli.launch.compose import register_parts
    from grpocli.tracking.run_dir import RunDir
    from grpocli.tracking.runs import load_yaml

    register_parts()
    config = OmegaConf.create(own_parts(load_yaml(RunDir(run).config)))
    return formula_lines(explanation(build(config), config, []))


def own_parts(saved: dict[str, Any]) -> dict[str, Any]:
    """The config of a run without code outside grpocli, which a report does not run.

    Rewards become a reward without a formula; parts that the formula does not show become built-in ones. Raises
    ConfigError if the algorithm or the task names such code.
    """
    config = dict(saved) | {
        "overrides": [],
        "engine": {"_target_": "engine/auto"},
        "tracker": {"_target_": "tracker/none"},
    }
    rewards = config.get("reward") or {}
    config["reward"] = {
        name: reward if not _foreign(reward) else {"_target_": PLAIN_REWARD, "weight": reward.get("weight", 1.0)}
        for name, reward in rewards.items()
    }
    if foreign := _foreign({**config, "reward": {}}):
        hint = "grpocli explain resume=RUN runs it"
        raise ConfigError(
            "is code outside grpocli, which a report does not run", value=foreign, key="_target_", hint=hint
        )
    return config


def _foreign(node: Any) -> str:
    """The first `_target_` below a plain config that is not a registered part; "" if there is none."""
    from grpocli.config.former_targets import FORMER
    from grpocli.config.parts import CLASSES

    if not isinstance(node, dict):
        return ""
    target = str(node.get("_target_", ""))
    if target and FORMER.get(target, target) not in CLASSES:
        return target
    return next((found for child in node.values() if (found := _foreign(child))), "")


def _check_writable(out: Path, folders: Sequence[Path]) -> None:
    """Raise ConfigError before the work if the page cannot be written."""
    if any(not folder.is_dir() for folder in folders):
        return  # another sentence says so
    if out.is_dir():
        raise _unwritable(out, "is a folder")
    if not out.parent.is_dir():
        raise _unwritable(out, "its folder does not exist")
    if not os.access(out.parent, os.W_OK):
        raise _unwritable(out, "its folder cannot be written")


def _unwritable(out: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"the page cannot be written: {problem}", value=out, key="--out", hint="name another file with --out FILE.html"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpocli report",
        description="Write a page about runs as one HTML file, which needs no network.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN|SWEEP", help="a run, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="the file (report.html in the first folder)")
    parser.add_argument("--completions", type=int, metavar="N", help="about N completions (as many as fit in 6 MB)")
    return parser


def _progress(done: float, total: float, unit: str, detail: str = "") -> None:
    if total > 500 and sys.stderr.isatty():
        print(f"\r{done:,.0f} of {total:,.0f} {unit}   ", end="\n" if done >= total else "", file=sys.stderr)
