"""What a config needs of a machine, and the checks of it: devices, memory, disk, model, data, packages."""

from __future__ import annotations

import json
import shlex
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
from grpocli.rollout.sync_config import ServerLocation
from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
from grpocli.tasks.loading import is_remote, looks_local
from grpocli.tasks.task import key_of
from grpocli_tools.doctor.machine import PROBE_SECONDS, PROBES, Finding, MachineCheck, Needs, ok, problem, warning
from grpocli_tools.doctor.resources import in_cache, room, runs_folder
from grpocli_tools.doctor.software import torch_report

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.doctor.machine import Machine

LONG_STEP = 3600.0
"""Seconds of a step from which a run on a CPU is worth a warning."""
FIXES = {
    "tracker": "tracker=none",
    "data": "task.path=FILE, or another task=NAME or reward=[NAME]",
    "model": "model=hf model.path=FOLDER, or on a machine that reaches the hub: hf download NAME, and copy HF_HOME",
    "teacher": "algorithm.kl.model=FOLDER, a model with the policy's tokenizer",
}
"""What to do where an error has no hint."""
SHOWN = ("tracker", "model", "data")
"""The lines that stand in every result."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and AdamW's two moments in float32."""
SMALLER = "run on a machine with GPUs, or choose a smaller model and shorter completions"


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
        """What the config needs of this machine."""
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
        """The checks of this config."""
        return [
            MachineCheck("config", "ready", self._ready, PROBE_SECONDS),
            MachineCheck("config", "devices", self._devices, PROBES),
            MachineCheck("config", "sync", self._sync, PROBES),
            MachineCheck("config", "plan", self._plan, PROBES),
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
        else:
            yield self._without_gpu(machine)

    def _without_gpu(self, machine: Machine) -> Finding:
        """Whether the run can compute on the CPU: it fits, and a step ends within an hour."""
        if self.run.hardware.device == "cuda":
            advice = "run on a machine with a GPU, or hardware.device=cpu"
            return Finding("devices", "error", "hardware.device=cuda, and there is no GPU", advice)
        plan, _ = self._planned(machine)
        detail = "no GPU; the run computes on the CPU"
        if plan is None and getattr(self.run.model, "path", None) is not None:
            return warning("devices", f"{detail}, for which there is no estimate", SMALLER)
        if plan and not plan["fits"]:
            return Finding("devices", "error", "no GPU, and the CPU's memory does not hold the run", SMALLER)
        hours = sum(plan["step"]["seconds"].values()) / LONG_STEP if plan else 0
        if hours > 1:
            slow = f"no GPU, and a step with completions of full length takes the CPU about {hours:,.0f} hours"
            return warning("devices", slow, SMALLER)
        return ok("devices", detail)

    def _sync(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        """Whether weights can reach vLLM without GPUs."""
        run = self.run
        gpus = run.hardware.device != "cpu" and torch_report(machine).gpus
        if not self.slurm and not gpus and isinstance(run.engine, Vllm):
            choose = partial(run.sync.choose, ServerLocation(gpu=False))
            yield _tried("sync", choose, "weights reach vLLM by ", "sync=shm")

    def _plan(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        """Memory and disk, from `grpocli plan` in another process."""
        plan, reason = self._planned(machine)
        command = shlex.join(["grpocli", "plan", *self._plan_words()])
        if plan is None:
            yield Finding("plan", "warning", f"no estimate: {reason}", command)
            return
        worst = max(plan["devices"], key=lambda device: device["peak"] / device["memory"])
        used = f"{worst['peak'] / 2**30:,.1f} of {worst['memory'] / 2**30:,.1f} GiB on {worst['name']}"
        advice = "" if plan["fits"] else f"{command} lists the keys to change"
        yield problem("plan", f"needs {used}", advice, not plan["fits"], "ok")
        checkpoint, steps, model = self.run.checkpoint, self.run.train.steps, plan["model"]
        saved = max(1, steps // checkpoint.every if checkpoint.every else 1)
        kept = min(checkpoint.keep + 1, saved) if checkpoint.keep else saved
        size = float(BYTES_PER_PARAMETER * model["trained"] * kept + 4 * model["parameters"])
        advice = "hydra.run.dir=FOLDER on a larger disk, a smaller checkpoint.keep, or a larger checkpoint.every"
        yield room(machine, "checkpoints", runs_folder(machine, needs), size, advice)

    def _plan_words(self) -> list[str]:
        return [word for word in self.words if not word.startswith("hydra")]

    def _planned(self, machine: Machine) -> tuple[dict[str, Any] | None, str]:
        """The plan, and why there is none."""

        def planned() -> tuple[dict[str, Any] | None, str]:
            options = ["plan", "--json", "--no-advice"]
            command = [machine.python, "-P", "-m", "grpocli", *options, *self._plan_words()]
            ended = machine.run(command, PROBE_SECONDS)
            try:
                return json.loads(ended.out), ""
            except ValueError:
                return None, ended.reason.removeprefix("grpocli: error: ")

        return machine.once("plan", planned)


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
