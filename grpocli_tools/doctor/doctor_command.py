"""`grpocli doctor`: check whether this machine is ready, for a default run or for a config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpocli.text import counted, one_line
from grpocli_tools.command_line import composed, parser_of, stages

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from grpocli_tools.doctor.machine import Finding, FindingGroup, MachineCheck

EXAMPLES = """\
It takes about ten seconds, and starts nothing. Exit code 1: an error, which would stop the run.

examples
  grpocli doctor
  grpocli doctor recipe=dapo-qwen2.5-32b             is it ready for this config?
  grpocli doctor engine=vllm model=qwen2.5-1.5b task=gsm8k
  grpocli doctor --json
"""
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "-": "dim"}


def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns the exit code: 1 with errors, else 0. Raises ConfigError."""
    parser = parser_of("doctor", "[--json]", __doc__, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="a list of {name, status, detail, advice}")
    args = parser.parse_intermixed_args(argv)
    groups = _examined(args.overrides, args.config_dir)
    from grpocli_tools.console import CleanConsole

    findings = [one for group in groups for one in group.findings]
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in findings], indent=2))
    else:
        out = CleanConsole()
        _print_groups(out, groups, max(len(one.name) for one in findings))
        subject = " ".join(args.overrides) or "the default run"
        wrong, warned = (sum(one.status == status for one in findings) for status in ("error", "warning"))
        verdict = f"Not ready for {subject}: {counted(wrong, 'error')}" if wrong else f"Ready for {subject}: no errors"
        out.print(f"{verdict}, {counted(warned, 'warning')}.", style="bold", soft_wrap=True)
    return int(any(one.status == "error" for one in findings))


def _examined(overrides: list[str], config_dir: str | None) -> list[FindingGroup]:
    """The findings. Raises ConfigError if the config cannot be composed."""
    from grpocli.composition.compose import build_run
    from grpocli_tools.doctor.config import CheckedConfig, runs_in
    from grpocli_tools.doctor.machine import Machine, Needs, examine

    checks, needs = _machine_checks(), Needs()
    if overrides:
        run = build_run(composed(overrides, config_dir))
        config = CheckedConfig(run, overrides, runs_in(overrides, Path.cwd()))
        checks, needs = [*config.checks(), *checks], config.needs()
    with stages() as view:
        view.stage("examining this machine")
        return examine(checks, Machine(), needs, view.progress)


def _machine_checks() -> list[MachineCheck]:
    """The checks of a machine, in the order of the report."""
    from grpocli_tools.doctor import resources, software
    from grpocli_tools.doctor.machine import PROBES, MachineCheck

    return [
        MachineCheck("software", "packages", software.packages),
        MachineCheck("software", "torch", software.torch, PROBES),
        MachineCheck("software", "vLLM", software.vllm, PROBES),
        MachineCheck("GPUs", "GPUs", software.gpus, PROBES),
        MachineCheck("GPUs", "NCCL", software.nccl, PROBES),
        MachineCheck("machine", "cores", resources.cores),
        MachineCheck("machine", "memory", resources.memory),
        MachineCheck("machine", "/dev/shm", resources.shared_memory),
        MachineCheck("machine", "open files", resources.open_files),
        MachineCheck("machine", "sandbox", software.sandbox, PROBES),
        MachineCheck("disk", "disk", resources.disk),
        MachineCheck("network", "hub", resources.hub),
        MachineCheck("network", "loopback", resources.ports),
        MachineCheck("network", "SLURM", resources.slurm),
    ]


def _print_groups(out: Console, groups: Sequence[FindingGroup], width: int) -> None:
    """Print the findings below their headings. width: of their names."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for group in groups:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=7)
        table.add_column(width=width)
        table.add_column(overflow="fold", ratio=1)
        for one in group.findings:
            table.add_row(Text(one.status, style=STYLES[one.status]), Text(one_line(one.name)), _detail(one))
        if group.findings:
            out.print(Text(group.title, style="bold"))
            out.print(Padding(table, (0, 0, 1, 2)))


def _detail(one: Finding) -> Text:
    """What was found, and what to do."""
    from rich.text import Text

    detail = Text(one_line(one.detail), style="dim" if one.status == "-" else "", overflow="fold")
    if one.advice and one.status in ("warning", "error"):
        detail.append(f"\n-> {one_line(one.advice)}", style="" if one.status == "warning" else "bold")
    return detail
