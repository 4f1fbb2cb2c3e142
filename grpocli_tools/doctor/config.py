"""What a config needs of a machine, and the checks of it: devices, memory, disk, model, data, packages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.algorithm.kl import BUILT_IN, has_teacher
from grpocli.composition.overrides import text_of
from grpocli.errors import ConfigError
from grpocli.hardware import Single, split
from grpocli.hub import hub_path
from grpocli.models.quantization import INSTALL
from grpocli.rewards.code import CodeReward
from grpocli.rollout.sync_config import ServerLocation
from grpocli.rollout.vllm.engine_parts import Vllm, VllmColocate
from grpocli.tasks.loading import is_remote, looks_local
from grpocli.tasks.task import key_of, tasks_of
from grpocli.training.optim import AdamW8bit
from grpocli_tools.doctor.checkup import Finding, MachineCheck, ok, problem, warning
from grpocli_tools.doctor.devices import TORCH_SECONDS, torch_report
from grpocli_tools.doctor.needs import Module, Needs
from grpocli_tools.doctor.resources import room, runs_folder
from grpocli_tools.doctor.surroundings import in_cache

if TYPE_CHECKING:
    from grpocli.config.schema import Run
    from grpocli_tools.doctor.machine import Machine

PLAN_SECONDS = 45.0
LONG_STEP = 3600.0
"""Seconds of a step from which a run on a CPU is worth a warning."""
FIXES = {
    "tracker": "tracker=none",
    "data and rewards": "task.path=FILE, or another task=NAME or reward=[NAME]",
    "model": "model=hf model.path=FOLDER, or on a machine that reaches the hub: hf download NAME, and copy HF_HOME",
    "teacher": "algorithm.kl.model=FOLDER, a model with the policy's tokenizer",
}
"""What to do where an error has no hint."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and AdamW's two moments in float32."""


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """The config to check. words: its overrides.

    ready: {what: raises ConfigError if this machine lacks it}. slurm: whether a cluster's nodes run it.
    runs: the folder of its runs.
    """

    run: Run
    words: Sequence[str]
    ready: Mapping[str, Callable[[], None]]
    slurm: bool
    runs: Path | None = None

    def needs(self, machine: Machine) -> Needs:
        """What the config needs of this machine."""
        run, engine = self.run, self.run.engine
        own_vllm = isinstance(engine, VllmColocate) or (isinstance(engine, Vllm) and not engine.urls)
        code = next((one for one in run.reward.values() if isinstance(one, CodeReward) and not one.unsafe), None)
        return Needs(
            vllm="engine=vllm" if own_vllm and not self.slurm else "",
            cuda="hardware.device=cuda" if run.hardware.device == "cuda" and not self.slurm else "",
            slurm="hydra/launcher=slurm" if self.slurm else "",
            hub=", ".join(_on_hub(run, machine)),
            sandbox="reward=[code]" if code else "",
            python=code.python if code else None,
            shared_memory="engine=vllm" if own_vllm and not self.slurm else "",
            modules=tuple(_modules(run)),
            runs=self.runs,
        )

    def checks(self) -> list[MachineCheck]:
        """The checks of this config."""
        return [
            MachineCheck("config", "ready", lambda machine, needs: self._ready(), 30.0),
            MachineCheck("config", "devices", self._devices, PLAN_SECONDS + 5),
            MachineCheck("config", "sync", self._sync, TORCH_SECONDS + 5),
            MachineCheck("config", "plan", self._plan, PLAN_SECONDS + 5),
        ]

    def _ready(self) -> Iterator[Finding]:
        for name, check in self.ready.items():
            try:
                check()
            except ConfigError as error:
                yield Finding(name, "error", str(replaced(error)), error.hint or FIXES[name])
            else:
                yield ok(name, "no file or package is missing")

    def _devices(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        hardware = self.run.hardware
        if self.slurm or not isinstance(hardware, Single):
            yield Finding("devices", "-", "those of the cluster's nodes")
            return
        count = 0 if hardware.device == "cpu" else len(torch_report(machine, needs).gpus)
        if not count:
            yield self._without_gpu(machine)
            return
        try:
            yield ok("devices", str(split(hardware, self.run.engine, [str(number) for number in range(count)])))
        except ConfigError as error:
            yield Finding("devices", "error", str(replaced(error)), error.hint or "hardware.processes=1")

    def _without_gpu(self, machine: Machine) -> Finding:
        """Whether the run can compute on the CPU: it fits, and a step ends within an hour."""
        if self.run.hardware.device == "cuda":
            advice = "run on a machine with a GPU, or hardware.device=cpu"
            return Finding("devices", "error", "hardware.device=cuda, and there is no GPU", advice)
        plan, _ = self._planned(machine)
        advice = "run on a machine with GPUs, or choose a smaller model and shorter completions"
        if plan is None:
            small = getattr(self.run.model, "path", None) is None
            detail = "no GPU; the run computes on the CPU"
            return (
                ok("devices", detail)
                if small
                else warning("devices", f"{detail}, for which there is no estimate", advice)
            )
        if not plan["fits"]:
            return Finding("devices", "error", "no GPU, and the CPU's memory does not hold the run", advice)
        seconds = sum(plan["step"]["seconds"].values())
        if seconds > LONG_STEP:
            detail = (
                f"no GPU, and a step with completions of full length takes the CPU about {seconds / 3600:,.0f} hours"
            )
            return warning("devices", detail, advice)
        return ok("devices", "no GPU; the run computes on the CPU")

    def _sync(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        """Whether weights can reach vLLM without GPUs."""
        run = self.run
        gpus = run.hardware.device != "cpu" and torch_report(machine, needs).gpus
        if self.slurm or gpus or not isinstance(run.engine, Vllm):
            return
        try:
            transport = run.sync.choose(ServerLocation(gpu=False))
        except ConfigError as error:
            yield Finding("sync", "error", str(replaced(error)), error.hint or "sync=shm")
        else:
            yield ok("sync", f"weights reach vLLM by {transport}")

    def _plan(self, machine: Machine, needs: Needs) -> Iterator[Finding]:
        """Memory and disk, from `grpocli plan` in another process."""
        plan, reason = self._planned(machine)
        words = self._plan_words()
        if plan is None:
            yield Finding("plan", "warning", f"no estimate: {reason}", shlex.join(["grpocli", "plan", *words]))
            return
        worst = max(plan["devices"], key=lambda device: device["peak"] / device["memory"])
        used = f"{worst['peak'] / 2**30:,.1f} of {worst['memory'] / 2**30:,.1f} GiB on {worst['name']}"
        advice = f"{shlex.join(['grpocli', 'plan', *words])} lists the keys to change"
        yield problem("plan", f"needs {used}", advice, not plan["fits"], "ok")
        yield self._disk(machine, needs, plan["model"])

    def _plan_words(self) -> list[str]:
        return [word for word in self.words if not word.startswith("hydra")]

    def _planned(self, machine: Machine) -> tuple[dict[str, Any] | None, str]:
        """The plan, and why there is none."""

        def planned() -> tuple[dict[str, Any] | None, str]:
            options = ["plan", "--json", "--no-advice"]
            command = [machine.python, "-P", "-m", "grpocli", *options, *self._plan_words()]
            ended = machine.run(command, PLAN_SECONDS)
            try:
                return json.loads(ended.out), ""
            except ValueError:
                late = f"grpocli plan did not end within {PLAN_SECONDS:g} s"
                return None, late if ended.code is None else ended.last_error.removeprefix("grpocli: error: ")

        return machine.once("plan", planned)

    def _disk(self, machine: Machine, needs: Needs, model: Mapping[str, Any]) -> Finding:
        checkpoint = self.run.checkpoint
        steps = self.run.train.steps
        saved = max(1, steps // checkpoint.every if checkpoint.every else 1)
        kept = min(checkpoint.keep + 1, saved) if checkpoint.keep else saved
        size = float(BYTES_PER_PARAMETER * model["trained"] * kept + 4 * model["parameters"])
        folder = runs_folder(machine, needs)
        advice = "hydra.run.dir=FOLDER on a larger disk, a smaller checkpoint.keep, or a larger checkpoint.every"
        return replace(room(machine, "checkpoints", folder, size, advice), name="checkpoints")


def replaced(error: ConfigError) -> ConfigError:
    """The error without its hint, which is the advice."""
    return ConfigError(error.problem, key=error.key, value=error.value)


def _name_on_hub(path: Any) -> Any:
    """OWNER/NAME of `hub:OWNER/NAME@REVISION`; another path as it is."""
    place = hub_path(path, "model.path") if isinstance(path, str) else None
    return place.repo if place else path


def _on_hub(run: Run, machine: Machine) -> Iterator[str]:
    """The keys of the model and the data that are neither on this machine nor in the hub's cache."""
    path = _name_on_hub(getattr(run.model, "path", None))
    if isinstance(path, str) and not Path(path).expanduser().exists() and not in_cache(machine, path, "models"):
        yield f"model.path={path}"
    for name in run.algorithm.kl.models.values() if has_teacher(run.algorithm.kl) else ():
        repo = str(_name_on_hub(name))
        if name != BUILT_IN and not Path(name).expanduser().exists() and not in_cache(machine, repo, "models"):
            yield f"algorithm.kl.model={name}"
    for name, task in tasks_of(run.task).items():
        path = getattr(task, "path", None)
        if not isinstance(path, str) or looks_local(path) or is_remote(path) or Path(path).exists():
            continue
        if not in_cache(machine, path, "datasets"):
            yield f"{key_of(run.task, name)}.path={path}"


def runs_in(words: Sequence[str], folder: Path) -> Path | None:
    """The folder of `hydra.run.dir=` among overrides, without what changes from run to run; None if it is not given."""
    given = [text_of(word) for word in words if word.startswith("hydra.run.dir=")]
    return folder / Path(given[-1].partition("${")[0]).expanduser() if given else None


def _modules(run: Run) -> Iterator[Module]:
    if run.hardware.parallel in ("zero2", "zero3"):
        parallel = f"hardware.parallel={run.hardware.parallel}"
        yield Module("deepspeed", parallel, "in a clone of grpocli: pip install '.[deepspeed]'")
    if run.model.lora.rank:
        yield Module("peft", "model.lora.rank", "pip install peft")
    if quantization := getattr(run.model, "quantization", None):
        yield Module("bitsandbytes", f"model.quantization={quantization}", INSTALL)
    if isinstance(run.optim, AdamW8bit):
        yield Module("bitsandbytes", "optim=adamw_8bit", INSTALL)
    if run.model.attention == "flash_attention_2":
        key = "model.attention"
        yield Module("flash_attn", key, "model.attention=null, or pip install flash-attn")
