"""Checks of torch, of the GPUs and of NCCL between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from grpocli_tools.doctor.checkup import GIB, Finding, not_needed, ok, problem, warning
from grpocli_tools.doctor.machine import MISSING

if TYPE_CHECKING:
    from grpocli_tools.doctor.checkup import Needs
    from grpocli_tools.doctor.machine import Machine

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
    """What the probe found."""

    error: str = ""
    """Why torch cannot be imported; "" if it can."""
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    cpu: bool = True
    """Whether it computes on the CPU."""
    gpus: tuple[Mapping[str, Any], ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    """{library: why it cannot be imported}."""
    seconds: float = 0.0


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
    ended = machine.probe("torch_probe", *LIBRARIES)
    found = ended.answers()
    if "version" not in found:
        return TorchReport(error=ended.reason)
    broken = dict(found.get("broken", {}))
    if ended.code != 0:
        broken[found.get("importing") or "torch"] = ended.reason
    return TorchReport(
        version=found["version"],
        cuda=found["cuda"],
        hip=found["hip"],
        cpu=found.get("cpu", False),
        gpus=tuple(found.get("gpus", ())),
        broken=broken,
        seconds=found.get("whole", 0.0),
    )


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
        yield problem("torch and GPUs", f"{_number(present)}, and {detail}", advice, needs.cuda)
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


def _number(present: list[Gpu]) -> str:
    return f"there {'is 1 GPU' if len(present) == 1 else f'are {len(present)} GPUs'}"


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


def nccl(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether the GPUs can add a tensor together."""
    count = len(torch_report(machine).gpus)
    if count < 2:
        yield not_needed("NCCL", "connects two GPUs or more")
    else:
        yield connected(machine, "nccl", count, bool(needs.cuda))


def connected(machine: Machine, backend: str, count: int, needed: bool) -> Finding:
    """A finding about a sum over `count` processes by torch.distributed."""
    ended = machine.probe("collective_probe", backend, str(count))
    found = ended.answers()
    name, what = backend.upper(), "GPUs" if backend == "nccl" else "processes"
    if ended.code == 0 and found.get("sum") == count:
        return ok(name, f"{count} {what} add a tensor in {1e3 * found['seconds']:.1f} ms")
    advice = "NCCL_DEBUG=INFO grpocli doctor shows more; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 may help"
    return problem(name, f"{count} {what} cannot add a tensor: {ended.reason}", advice, needed)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
