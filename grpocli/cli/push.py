"""`grpocli push`: push a run to the hub, or repeat a push."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpocli.cli import plain_parser
from grpocli.errors import ConfigError

EXAMPLES = """\
examples
  grpocli push runs/DATE/TIME --to OWNER/NAME            model, card, report, config, metrics and rollouts
  grpocli push RUN --to OWNER/NAME --checkpoints         its checkpoints, too, from which others can resume
  grpocli push RUN                                       again to the repository of its config, hub.push

The token is that of HF_TOKEN or `hf auth login`. A push can be repeated: what is there is not sent again.
"""


def main(argv: Sequence[str]) -> int:
    """Push. Returns the exit code. Raises ConfigError if the folder holds no run, or if the hub refuses it."""
    args = _parser().parse_args(argv)
    from grpocli.hub import hub_api
    from grpocli.publish.push import Pusher
    from grpocli.runs.run_dir import RunDir
    from grpocli.runs.saved_run import check_is_run
    from grpocli.text import clean

    check_is_run(args.run, "RUN FOLDER")
    run_dir = RunDir(args.run)
    if run_dir.is_running():
        raise ConfigError("is running; hub.push=OWNER/NAME pushes it at its end", key="RUN", value=args.run)
    print(clean(Pusher(run_dir, _hub(args), "--to", hub_api()).push(_progress)))
    return 0


def _hub(args: argparse.Namespace) -> Any:
    """The `hub` section of the run's config, with the options given now."""
    from grpocli.config.schema import Hub
    from grpocli.runs.saved_run import SavedRun

    names = {field.name for field in dataclasses.fields(Hub)}
    values = {key: value for key, value in SavedRun(args.run).section("hub").items() if key in names}
    given = {"push": args.to, "checkpoints": args.checkpoints}
    values |= {key: value for key, value in given.items() if value is not None}
    if values.get("push") is None:
        raise ConfigError("name the repository: --to OWNER/NAME", key="--to")
    return Hub(**values)


def _parser() -> argparse.ArgumentParser:
    about = "Push a run to a model repository of the Hugging Face hub. Defaults are in its config: hub.*"
    parser = plain_parser("push", about, EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--to", metavar="OWNER/NAME", help="the repository; made, as a private one, if it is not there")
    parser.add_argument("--checkpoints", action=argparse.BooleanOptionalAction, help="push its checkpoints, too")
    return parser


def _progress(done: float, total: float, unit: str, detail: str = "") -> None:
    if sys.stderr.isatty():
        print(f"pushing, {done:.0f} of {total:.0f} {unit} done", file=sys.stderr)
