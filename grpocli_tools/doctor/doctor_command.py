"""`grpocli doctor`: check whether this machine is ready, for a default run or for a config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli_tools.command_line import composed, parser_of

if TYPE_CHECKING:
    from grpocli_tools.doctor.checkup import FindingGroup
    from grpocli_tools.doctor.config import CheckedConfig

EXAMPLES = """\
It takes about ten seconds, and starts nothing. Exit code 1: an error, which would stop the run.

examples
  grpocli doctor
  grpocli doctor recipe=dapo-qwen2.5-32b             is it ready for this config?
  grpocli doctor engine=vllm model=qwen2.5-1.5b task=gsm8k
  grpocli doctor --json
"""


def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns the exit code: 1 with errors, else 0. Raises ConfigError."""
    parser = parser_of("doctor", "[--json]", __doc__, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="a list of {name, status, detail, advice}")
    args = parser.parse_intermixed_args(argv)
    groups = _examined(args.overrides, args.config_dir)
    from grpocli_tools.console import CleanConsole
    from grpocli_tools.doctor.report import as_list, errors, print_report

    if args.json:
        print(json.dumps(as_list(groups), indent=2))
    else:
        print_report(CleanConsole(), groups, " ".join(args.overrides) or "the default run")
    return 1 if errors(groups) else 0


def _examined(overrides: list[str], config_dir: str | None) -> list[FindingGroup]:
    from grpocli.views.live_view import status_view
    from grpocli_tools.doctor.checks import MACHINE
    from grpocli_tools.doctor.checkup import examine
    from grpocli_tools.doctor.machine import Machine, end_commands
    from grpocli_tools.doctor.needs import Needs

    machine = Machine()
    config = _config(overrides, config_dir) if overrides else None
    checks, needs = ([*config.checks(), *MACHINE], config.needs(machine)) if config else (MACHINE, Needs())
    view = status_view()
    try:
        view.stage("examining this machine")
        return examine(checks, machine, needs, view.progress)
    finally:
        end_commands()  # after Ctrl-C, or of a check that exceeded its deadline
        view.stop()


def _config(overrides: list[str], config_dir: str | None) -> CheckedConfig:
    """The config of these overrides. Raises ConfigError if it cannot be composed."""
    from grpocli.composition.checks import file_checks
    from grpocli.composition.compose import build_run
    from grpocli_tools.doctor.config import FIXES, CheckedConfig, runs_in

    run = build_run(composed(overrides, config_dir))
    ready = {name: check for name, check in file_checks(run).items() if name in FIXES}
    return CheckedConfig(run, overrides, ready, "hydra/launcher=slurm" in overrides, runs_in(overrides, Path.cwd()))
