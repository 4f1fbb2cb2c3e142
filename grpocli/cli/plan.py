"""`grpocli plan`: estimate memory and work of a run from its config and the model's config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpocli.cli.hydra_app import composed, parser_of

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.plan.plan import Plan
    from grpocli.plan.resources import DeviceOptions
    from grpocli.tracking.view import View

EXAMPLES = """\
It accepts the overrides of `grpocli train` and loads no weights. Exit code 1: it does not fit.

examples
  grpocli plan
  grpocli plan recipe=qwen2.5-72b-slurm
  grpocli plan model=qwen2.5-7b hardware.device=cuda --devices 8 --memory 80
  grpocli plan model=hf model.path=FOLDER            a folder with config.json is enough
  grpocli plan --json model.lora.rank=16
"""


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns the exit code: 0, or 1 if it does not fit. Raises ConfigError."""
    args = _parser().parse_intermixed_args(argv)
    from grpocli.plan.resources import DeviceOptions

    asked = DeviceOptions(args.memory, args.devices, args.tflops, args.bandwidth)
    run = _run(args.overrides, args.config_dir)

    from grpocli.tracking.live_view import status_view

    view = status_view()
    try:
        plan, changes = _made(run, asked, args, view)
    finally:
        view.stop()
    from grpocli.plan.report import as_dict, as_text

    title = " ".join(args.overrides)
    print(json.dumps(as_dict(plan, changes), indent=2) if args.json else as_text(plan, title, changes).rstrip())
    return 0 if plan.fits else 1


def _made(run: Run, asked: DeviceOptions, args: argparse.Namespace, view: View) -> tuple[Plan, list[str]]:
    """The plan, and changes with which it fits if it does not."""
    view.stage("loading libraries")
    from grpocli.launch.trainer_process import quiet_libraries
    from grpocli.plan.plan import load_libraries, make_plan
    from grpocli.plan.report import advice

    def again(change: list[str]) -> Plan:
        return make_plan(_run([*args.overrides, *change], args.config_dir), asked)

    quiet_libraries()
    load_libraries()
    plan = make_plan(run, asked, view.stage)
    if plan.fits or args.no_advice:
        return plan, []
    view.stage("trying changes that may fit")
    return plan, list(advice(plan, again))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("plan", "[--memory GIB] [--devices N] [--no-advice] [--json]", __doc__, EXAMPLES)
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of one GPU, or of this machine on a CPU")
    parser.add_argument("--devices", type=int, metavar="N", help="number of GPUs, with hardware=single")
    parser.add_argument(
        "--tflops", type=float, metavar="T", help="bfloat16 operations per second of one device, in 10^12"
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="T", help="memory bandwidth of one device, in 10^12 bytes per second"
    )
    parser.add_argument("--no-advice", action="store_true", help="do not try changes with which it may fit")
    parser.add_argument("--json", action="store_true", help="print all figures, in bytes, operations and seconds")
    return parser


def _run(overrides: list[str], config_dir: str | None) -> Run:
    from grpocli.launch.compose import build_run

    return build_run(composed(overrides, config_dir))
