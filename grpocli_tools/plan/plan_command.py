"""`grpocli plan`: estimate memory and work of a run; exit code 1 if it does not fit."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parser_of, stages
from grpocli_tools.plan.resources import GPUS, DeviceOptions

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.views.view import View
    from grpocli_tools.plan.plan import Plan
    from grpocli_tools.plan.sweep import Options

EXAMPLES = """\
It accepts the overrides of `grpocli train` and loads no weights. Exit code 1: it does not fit.

examples
  grpocli plan
  grpocli plan recipe=qwen2.5-72b-slurm
  grpocli plan model=qwen2.5-7b hardware.device=cuda --devices 8 --memory 80
  grpocli plan model=hf model.path=FOLDER            a folder with config.json is enough
  grpocli plan --json model.lora.rank=16
  grpocli plan --simulate recipe=qwen2.5-72b-slurm  how many rollout nodes
"""
SIMULATION = ("lengths", "speeds", "kept", "failures", "save", "restart", "steps")
"""Options that only a simulation has."""
FAULTS = {"failures": "per_hour", "save": "save", "restart": "restart"}


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns the exit code: 0, or 1 if it does not fit. Raises ConfigError."""
    args = _parser().parse_intermixed_args(argv)
    given = {name: value for name in SIMULATION if (value := getattr(args, name)) is not None}
    if given and not args.simulate:
        raise ConfigError("add --simulate, which it is for", key=f"--{next(iter(given))}")
    if args.gpu or args.devices:  # not for this machine's CPU
        args.overrides.insert(0, "hardware.device=cuda")
    from grpocli.composition.compose import build_run

    run = build_run(composed(args.overrides, args.config_dir))
    options = _simulation(run, given) if args.simulate else None
    found = None
    with stages() as view:
        plan, changes = _plan_of(run, args, view)
        if options:
            from grpocli_tools.plan.sweep import sweep

            view.stage("simulating")
            found = sweep(plan, options)
    from grpocli_tools.plan import report

    if args.json:
        print(json.dumps(report.as_dict(plan, changes) | ({"simulation": found.as_dict()} if found else {}), indent=2))
    else:
        title = shlex.join(argv)
        print(report.simulation_text(found, title, plan) if found else report.as_text(plan, title, changes))
    return 0 if plan.fits else 1


def _simulation(run: Run, given: dict[str, Any]) -> Options:
    """The options of a simulation. Raises ConfigError if they do not suit the run."""
    from grpocli_tools.plan.simulate import Faults
    from grpocli_tools.plan.sweep import Options, check_options

    faults = Faults(**{FAULTS[name]: given.pop(name) for name in FAULTS if name in given})
    given["speeds"] = tuple(given.get("speeds", ()))
    options = Options(**given, faults=faults)
    check_options(run, options)
    return options


def _plan_of(run: Run, args: argparse.Namespace, view: View) -> tuple[Plan, list[str]]:
    """The plan, and changes that need less memory if it does not fit, or hardly, or that take less time if it does."""
    view.stage("loading libraries")
    import transformers.models.auto.modeling_auto  # noqa: F401  # most of a plan's time

    from grpocli.composition.checks import check_devices, check_splits
    from grpocli.composition.compose import build_run
    from grpocli_tools.plan.plan import make_plan
    from grpocli_tools.plan.report import advice, larger

    def planned(run: Run, devices: int | None, stage: Callable[[str], None] = lambda text: None) -> Plan:
        return make_plan(run, DeviceOptions(args.memory, devices, args.tflops, args.bandwidth, args.gpu), stage)

    def again(change: list[str]) -> Plan:
        return planned(build_run(composed([*args.overrides, *change], args.config_dir)), plan.resources.devices)

    plan = planned(run, args.devices, view.stage)
    check_devices(run, run.engine, plan.resources.trainers)
    if run.hardware.context_parallel > 1:
        check_splits(run, plan.size.config)
    if args.no_advice or args.simulate:
        return plan, []
    if plan.fits and not plan.is_tight:
        return plan, list(larger(plan, again))
    view.stage("trying changes that need less memory")
    return plan, list(advice(plan, again))


def _between(least: float, most: float, kind: type = float) -> Callable[[str], float]:
    """The type of an option that is a number in these bounds."""

    def number(text: str) -> float:
        value: float = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a number from {least:g} to {most:g}")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    usage = "[--gpu NAME] [--memory GIB] [--devices N] [--simulate] [--no-advice] [--json]"
    parser = parser_of("plan", usage, __doc__, EXAMPLES)
    speed = _between(1e-3, 1e6)
    parser.add_argument("--gpu", choices=GPUS, metavar="NAME", help=f"plan for this GPU: {', '.join(GPUS)}")
    parser.add_argument("--memory", type=speed, metavar="GIB", help="memory of one GPU, or of this machine on a CPU")
    parser.add_argument(
        "--devices", type=_between(1, 100_000, int), metavar="N", help="number of GPUs, with hardware=single"
    )
    parser.add_argument(
        "--tflops", type=speed, metavar="T", help="16-bit operations per second of one device, in 10^12"
    )
    parser.add_argument(
        "--bandwidth", type=speed, metavar="T", help="memory bandwidth of one device, in 10^12 bytes per second"
    )
    parser.add_argument("--no-advice", action="store_true", help="do not try changes of keys")
    parser.add_argument("--json", action="store_true", help="print all figures, in bytes, operations and seconds")
    group, amount = parser.add_argument_group("simulation"), _between(0, 1e9)
    group.add_argument("--simulate", action="store_true", help="simulate steps, with several numbers of servers")
    group.add_argument(
        "--lengths", metavar="MEAN[,SPREAD]|RUN", help="tokens of completions: mean and relative deviation, or a run's"
    )
    group.add_argument(
        "--speeds", metavar="RUN", action="append", help="take speeds from a synchronous run; several runs are pooled"
    )
    group.add_argument(
        "--kept", type=_between(1e-3, 1), metavar="SHARE", help="share of groups kept, with keep=dynamic (1)"
    )
    group.add_argument("--failures", type=amount, metavar="N", help="failures of a device in an hour (0)")
    group.add_argument("--save", type=amount, metavar="S", help="seconds that training waits to save (0)")
    group.add_argument("--restart", type=amount, metavar="S", help="seconds to start again after a failure (600)")
    group.add_argument("--steps", type=_between(1, 10_000, int), metavar="N", help="steps to simulate (20)")
    return parser
