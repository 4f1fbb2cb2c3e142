"""`grpocli plan`: estimate memory and work of a run; exit code 1 if it does not fit."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError
from grpocli_tools.command_line import composed, parse, stages
from grpocli_tools.options import parser_of
from grpocli_tools.plan.resources import GPUS, DeviceOptions

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli.views.view import View
    from grpocli_tools.plan.plan import Plan
    from grpocli_tools.plan.sweep import Options

SIMULATION = ("lengths", "speeds", "kept", "failures", "save", "restart", "steps")
"""Options that only a simulation has."""
FAULTS = {"failures": "per_hour", "save": "save", "restart": "restart"}


def main(argv: Sequence[str]) -> int:
    args = parse(parser_of("plan", __doc__, gpu={"choices": list(GPUS)}), argv)
    given = {name: value for name in SIMULATION if (value := getattr(args, name)) is not None}
    if given and not args.simulate:
        raise ConfigError("add --simulate, which it is for", key=f"--{next(iter(given))}")
    if args.gpu or args.devices:  # not for this machine's CPU
        args.overrides.insert(0, "hardware.device=cuda")
    from grpocli.composition.compose import build_run

    run = build_run(composed(args.overrides, args.config_dir))
    options = _simulation(given) if args.simulate else None
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


def _simulation(given: dict[str, Any]) -> Options:
    from grpocli_tools.plan.simulate import Faults
    from grpocli_tools.plan.sweep import Options

    faults = Faults(**{FAULTS[name]: given.pop(name) for name in FAULTS if name in given})
    given["speeds"] = tuple(given.get("speeds", ()))
    return Options(**given, faults=faults)


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
