"""`grpocli plan`: estimate memory and work of a run; exit code 1 if it does not fit."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parser_of

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.views.view import View
    from grpocli_tools.plan.plan import Plan
    from grpocli_tools.plan.resources import DeviceOptions
    from grpocli_tools.plan.sweep import Options, Sweep

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
    from omegaconf import OmegaConf

    from grpocli.composition.compose import build_run
    from grpocli_tools.plan.resources import DeviceOptions

    asked = DeviceOptions(args.memory, args.devices, args.tflops, args.bandwidth, args.gpu)
    if args.gpu or args.devices:  # not for this machine's CPU
        args.overrides.insert(0, "hardware.device=cuda")
    _simulation(args, {})  # before anything slow
    config = composed(args.overrides, args.config_dir)
    run = build_run(config)
    simulation = _simulation(args, cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)))
    if simulation:
        from grpocli_tools.plan.sweep import check_options, sweep

        check_options(run, simulation)

    from grpocli.views.live_view import status_view

    view = status_view()
    try:
        plan, changes = _made(run, asked, args, view)
        found = None
        if simulation:
            view.stage("simulating")
            found = sweep(plan, simulation)
    finally:
        view.stop()
    print(_json(plan, changes, found) if args.json else _text(plan, changes, found, shlex.join(argv)))
    return 0 if plan.fits else 1


def _text(plan: Plan, changes: list[str], found: Sweep | None, title: str) -> str:
    from grpocli_tools.plan.report import as_text, simulation_text, verdict

    if found is None:
        return as_text(plan, title, changes).rstrip()
    text = simulation_text(found, title)
    return text.rstrip() if plan.fits else f"{text}\n{verdict(plan)}"


def _json(plan: Plan, changes: list[str], found: Sweep | None) -> str:
    from grpocli_tools.plan.report import as_dict

    more = {}
    if found is not None:
        from grpocli_tools.plan import sweep

        more = {"simulation": sweep.as_dict(found)}
    return json.dumps(as_dict(plan, changes) | more, indent=2)


def _simulation(args: argparse.Namespace, config: Mapping[str, Any]) -> Options | None:
    """The options of a simulation, if one is asked for. Raises ConfigError. config: of the plan."""
    given = {name: value for name in SIMULATION if (value := getattr(args, name)) is not None}
    if not args.simulate:
        if given:
            raise ConfigError(f"{', '.join(f'--{name}' for name in given)}: add --simulate, which it is for")
        return None
    from grpocli_tools.plan.simulate import Faults
    from grpocli_tools.plan.sweep import Options

    faults = Faults(**{FAULTS[name]: given.pop(name) for name in FAULTS if name in given})
    given["speeds"] = tuple(given.get("speeds", ()))
    return Options(**given, faults=faults, config=config)


def _made(run: Run, asked: DeviceOptions, args: argparse.Namespace, view: View) -> tuple[Plan, list[str]]:
    """The plan, and changes that need less memory if it does not fit, or hardly, or that take less time if it does."""
    view.stage("loading libraries")
    from grpocli.composition.compose import build_run
    from grpocli.composition.validate import check_context_parallel, check_shares, check_splits
    from grpocli_tools.plan.plan import load_libraries, make_plan
    from grpocli_tools.plan.report import advice, larger

    def again(change: list[str]) -> Plan:
        same = replace(asked, devices=plan.resources.devices)
        return make_plan(build_run(composed([*args.overrides, *change], args.config_dir)), same)

    load_libraries()
    plan = make_plan(run, asked, view.stage)
    check_shares(run, plan.resources.trainers)
    check_context_parallel(run, plan.resources.trainers)
    if run.hardware.context_parallel > 1:
        check_splits(run, plan.size.config)
    if args.no_advice or args.simulate:
        return plan, []
    if plan.fits and not plan.is_tight:
        return plan, list(larger(plan, again))
    view.stage("trying changes that need less memory")
    return plan, list(advice(plan, again))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "plan", "[--gpu NAME] [--memory GIB] [--devices N] [--simulate] [--no-advice] [--json]", __doc__, EXAMPLES
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for this GPU: H100, H100 PCIe, H200, H20, A100, A6000, L40S, L40 or L4"
    )
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of one GPU, or of this machine on a CPU")
    parser.add_argument("--devices", type=int, metavar="N", help="number of GPUs, with hardware=single")
    parser.add_argument(
        "--tflops", type=float, metavar="T", help="16-bit operations per second of one device, in 10^12"
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="T", help="memory bandwidth of one device, in 10^12 bytes per second"
    )
    parser.add_argument("--no-advice", action="store_true", help="do not try changes of keys")
    parser.add_argument("--json", action="store_true", help="print all figures, in bytes, operations and seconds")
    _add_simulation(parser)
    return parser


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument("--simulate", action="store_true", help="simulate steps, with several numbers of servers")
    group.add_argument(
        "--lengths", metavar="MEAN[,SPREAD]|RUN", help="tokens of completions: mean and relative deviation, or a run's"
    )
    group.add_argument(
        "--speeds", metavar="RUN", action="append", help="take speeds from a synchronous run; several runs are pooled"
    )
    group.add_argument("--kept", type=float, metavar="SHARE", help="share of groups kept, with keep=dynamic (1)")
    group.add_argument("--failures", type=float, metavar="N", help="failures of a device in an hour (0)")
    group.add_argument("--save", type=float, metavar="S", help="seconds that training waits to save (0)")
    group.add_argument("--restart", type=float, metavar="S", help="seconds to start again after a failure (600)")
    group.add_argument("--steps", type=int, metavar="N", help="steps to simulate (20)")
