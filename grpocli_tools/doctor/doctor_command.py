"""`grpocli doctor`: check whether this machine is ready, for a default run or for a config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.kl import BUILT_IN, has_teacher
from grpocli.composition.checks import FILES, check_file
from grpocli.composition.overrides import text_of
from grpocli.errors import ConfigError
from grpocli.hardware import Single, split
from grpocli.hub import hub_path
from grpocli.rewards.code import CodeReward
from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
from grpocli.tasks.loading import is_remote, looks_local
from grpocli.tasks.task import key_of
from grpocli.text import counted, one_line
from grpocli_tools.command_line import composed, parse, stages
from grpocli_tools.doctor.machine import PROBE_SECONDS, PROBES, Finding, MachineCheck, Needs, ok
from grpocli_tools.doctor.resources import in_cache
from grpocli_tools.doctor.software import torch_report
from grpocli_tools.options import parser_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from grpocli.config.schema import Run
    from grpocli_tools.doctor.machine import Finding, FindingGroup, Machine, MachineCheck

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "-": "dim"}


def main(argv: Sequence[str]) -> int:
    args = parse(parser_of("doctor", __doc__), argv)
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
    from grpocli.composition.compose import build_run
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
    from grpocli_tools.doctor import resources, software
    from grpocli_tools.doctor.machine import PROBES, MachineCheck

    return [
        MachineCheck("software", "packages", software.packages),
        MachineCheck("software", "torch", software.torch, PROBES),
        MachineCheck("software", "vLLM", software.vllm, PROBES),
        MachineCheck("GPUs", "GPUs", software.gpus, PROBES),
        MachineCheck("machine", "cores", resources.cores),
        MachineCheck("machine", "memory", resources.memory),
        MachineCheck("machine", "/dev/shm", resources.shared_memory),
        MachineCheck("machine", "open files", resources.open_files),
        MachineCheck("machine", "sandbox", software.sandbox, PROBES),
        MachineCheck("disk", "disk", resources.disk),
        MachineCheck("network", "hub", resources.hub),
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
    from rich.text import Text

    detail = Text(one_line(one.detail), style="dim" if one.status == "-" else "", overflow="fold")
    if one.advice and one.status in ("warning", "error"):
        detail.append(f"\n-> {one_line(one.advice)}", style="" if one.status == "warning" else "bold")
    return detail


FIXES = {
    "tracker": "tracker=none",
    "data": "task.path=FILE, or another task=NAME or reward=[NAME]",
    "model": "model=hf model.path=FOLDER, or on a machine that reaches the hub: hf download NAME, and copy HF_HOME",
    "teacher": "algorithm.kl.model=FOLDER, a model with the policy's tokenizer",
}
"""What to do where an error has no hint."""
SHOWN = ("tracker", "model", "data")
"""The lines that stand in every result."""


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """The config to check."""

    run: Run
    words: Sequence[str]
    """Its overrides."""
    runs: Path | None = None
    """The folder of its runs."""

    @property
    def slurm(self) -> bool:
        """Whether a cluster's nodes run it."""
        return "hydra/launcher=slurm" in self.words

    def needs(self) -> Needs:
        run, engine = self.run, self.run.engine
        own_vllm = isinstance(engine, VllmColocate) or (isinstance(engine, Vllm) and not engine.urls)
        code = next((one for one in run.reward.values() if isinstance(one, CodeReward) and not one.unsafe), None)
        return Needs(
            vllm="engine=vllm" if own_vllm and not self.slurm else "",
            cuda="hardware.device=cuda" if run.hardware.device == "cuda" and not self.slurm else "",
            slurm="hydra/launcher=slurm" if self.slurm else "",
            hub=", ".join(_on_hub(run)),
            sandbox="reward=[code]" if code else "",
            python=code.python if code else None,
            runs=self.runs,
        )

    def checks(self) -> list[MachineCheck]:
        return [
            MachineCheck("config", "ready", self._ready, PROBE_SECONDS),
            MachineCheck("config", "devices", self._devices, PROBES),
        ]

    def _ready(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        """The stage `files` of a run; whether vLLM is there is another check."""
        for name in FILES:
            found = _tried(
                name,
                partial(check_file, self.run, name),
                "no file or package is missing",
                FIXES.get(name, f"grpocli explain {name}"),
            )
            if name in SHOWN or (found.status == "error" and name != "engine"):
                yield found

    def _devices(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        hardware = self.run.hardware
        if self.slurm or not isinstance(hardware, Single):
            yield Finding("devices", "-", "those of the cluster's nodes")
        elif hardware.device != "cpu" and (gpus := torch_report(machine).gpus):
            devices = [str(number) for number in range(len(gpus))]
            yield _tried("devices", partial(split, hardware, self.run.engine, devices), "", "hardware.processes=1")
        elif hardware.device == "cuda":
            advice = "run on a machine with a GPU, or hardware.device=cpu"
            yield Finding("devices", "error", "hardware.device=cuda, and there is no GPU", advice)
        else:
            yield ok("devices", "no GPU; the run computes on the CPU, for how long says grpocli plan")


def _tried(name: str, check: Any, detail: str, fix: str) -> Finding:
    """The finding of a check that may raise ConfigError. detail: if it does not. fix: the advice without a hint."""
    try:
        found = check()
    except ConfigError as error:
        without_hint = ConfigError(error.problem, key=error.key, value=error.value)
        return Finding(name, "error", str(without_hint), error.hint or fix)
    return ok(name, detail if found is None else f"{detail}{found}")


def _on_hub(run: Run) -> Iterator[str]:
    """The keys of the model and the data that are neither on this machine nor in the hub's cache."""
    models = [("model.path", getattr(run.model, "path", None))]
    if has_teacher(run.algorithm.kl):
        models += [("algorithm.kl.model", name) for name in run.algorithm.kl.models.values()]
    for key, path in models:
        if isinstance(path, str) and path != BUILT_IN and not Path(path).expanduser().exists():
            place = hub_path(path, key)
            name = place.repo if place else path
            if not in_cache(name, "model"):
                yield f"{key}={name}"
    for name, task in run.tasks.items():
        path = getattr(task, "path", None)
        if not isinstance(path, str) or looks_local(path) or is_remote(path) or Path(path).exists():
            continue
        if not in_cache(path, "dataset"):
            yield f"{key_of(run.task, name)}.path={path}"


def runs_in(words: Sequence[str], folder: Path) -> Path | None:
    """The folder of `hydra.run.dir=` among overrides, without what changes from run to run; None if it is not given."""
    given = [text_of(word) for word in words if word.startswith("hydra.run.dir=")]
    return folder / Path(given[-1].partition("${")[0]).expanduser() if given else None
