"""Checks of torch, of the GPUs and of NCCL between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from grpocli_tools.doctor.checkup import Finding, not_needed, ok, problem, warning
from grpocli_tools.doctor.machine import MISSING
from grpocli_tools.doctor.needs import GIB

if TYPE_CHECKING:
    from grpocli_tools.doctor.machine import Machine
    from grpocli_tools.doctor.needs import Needs

TORCH_SECONDS = 60.0
NCCL_SECONDS = 45.0
SMI_SECONDS = 10.0
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
BUILT, BFLOAT16 = (7, 5), (8, 0)
"""The compute capabilities from which torch's builds for CUDA 12.8 have kernels, and a GPU has bfloat16."""


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What the probe found. error: why torch cannot be imported; "" if it can."""

    error: str = ""
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    cpu: bool = True
    gpus: tuple[Mapping[str, Any], ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi sees it. total, used: bytes. users, pids: the processes on it, as a phrase and as numbers."""

    index: str
    name: str
    driver: str
    total: float
    used: float
    capability: str
    users: str = ""
    pids: str = ""


def torch_report(machine: Machine, needs: Needs) -> TorchReport:
    """Torch and its devices, from another process."""
    return machine.once("torch", partial(_asked, machine, needs))


def _asked(machine: Machine, needs: Needs) -> TorchReport:
    more = [module.module for module in needs.modules if module.module == "peft"]
    ended = machine.probe("torch_probe", TORCH_SECONDS, *LIBRARIES, *more)
    found = ended.answers()
    if "version" not in found:
        reason = f"it did not load within {TORCH_SECONDS:g} s" if ended.code is None else ended.last_error
        return TorchReport(error=reason)
    broken = dict(found.get("broken", {}))
    if ended.code != 0:
        late = f"did not end within {TORCH_SECONDS:g} s" if ended.code is None else ended.last_error
        broken[found.get("importing") or "torch"] = late
    seconds = float(found.get("whole", TORCH_SECONDS))
    return TorchReport(
        "",
        found["version"],
        found["cuda"],
        found["hip"],
        bool(found.get("cpu")),
        tuple(found.get("gpus", ())),
        broken,
        seconds,
    )


def torch(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether torch and the libraries of every run can be imported and compute."""
    report = torch_report(machine, needs)
    if report.error:
        version = _version_of("torch", machine)
        yield Finding("torch", "error", f"cannot be imported: {report.error}", f"{REINSTALL} torch{version}")
        return
    for name, reason in report.broken.items():
        yield _broken(name, reason, report, machine, needs)
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


def _broken(name: str, reason: str, report: TorchReport, machine: Machine, needs: Needs) -> Finding:
    package = name.partition(".")[0]
    if package in FOR_VISION:
        detail = f"does not load beside torch {report.version}, so vLLM does not either: {reason}"
        advice = f"pip uninstall {package}; models of text do without it"
        return problem(package, detail, advice, needs.vllm)
    required = package == "torch" or any(package == one.partition(".")[0] for one in LIBRARIES) or needs.modules
    advice = f"{REINSTALL} {package}{_version_of(package, machine)}"
    return problem(package, f"cannot be imported: {reason}", advice, required)


def gpus(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The GPUs, their driver and memory, and who else uses them."""
    present, reason = nvidia_gpus(machine)
    report = torch_report(machine, needs)
    wanted = needs.cuda or needs.gpus
    if not present and not report.gpus:
        if reason:
            advice = "nvidia-smi shows the reason; sudo modprobe -r nvidia && sudo modprobe nvidia reloads the driver"
            yield problem("GPUs", f"nvidia-smi fails: {reason}", advice, wanted)
        else:
            why = needs.cuda or "the config"
            advice = f"hardware.device=cpu, or a machine with a GPU, which {why} needs" if wanted else ""
            yield problem("GPUs", "none; runs compute on the CPU", advice, wanted, otherwise="-")
        return
    if present and not report.gpus and not report.error:
        yield _unseen(present, report, machine, needs)
    for gpu in present:
        yield _gpu(gpu)
    for number, seen in enumerate(report.gpus):
        if seen.get("problem") or not seen.get("computes"):
            others = ",".join(str(other) for other in range(len(report.gpus)) if other != number)
            advice = f"export CUDA_VISIBLE_DEVICES={others} leaves it out; {REINSTALL} torch is for a wrong build"
            yield Finding(
                f"cuda:{number}", "error", f"{seen['name']}: {seen.get('problem', 'computes wrongly')}", advice
            )
        elif not present:
            yield ok(f"cuda:{number}", f"{seen['name']}, {_gib(seen['free'])} of {_gib(seen['total'])} GiB free")


def nvidia_gpus(machine: Machine) -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists, and why it fails; "" if it works or does not exist."""
    return machine.once("nvidia-smi", partial(_listed, machine))


def _listed(machine: Machine) -> tuple[list[Gpu], str]:
    options = ["--format=csv,noheader,nounits"]
    ended = machine.run(["nvidia-smi", f"--query-gpu={QUERY}", *options], SMI_SECONDS)
    if ended.code == MISSING:
        return [], ""
    if ended.code != 0:
        said = (ended.err or ended.out).strip().splitlines()
        return [], f"no answer within {SMI_SECONDS:g} s" if ended.code is None else (said or ["no message"])[-1]
    users = _users(machine.run(["nvidia-smi", f"--query-compute-apps={USERS}", *options], SMI_SECONDS).out)
    found = []
    for line in ended.out.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(QUERY.split(",")):
            index, name, driver, total, used, capability, uuid = words
            those = users.get(uuid, {})
            phrase, pids = ", ".join(those.values()), " ".join(those)
            found.append(Gpu(index, name, driver, _mib(total), _mib(used), capability, phrase, pids))
    return found, ""


def _users(text: str) -> dict[str, dict[str, str]]:
    """{GPU: {process: a phrase about it}}."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4:
            uuid, pid, name, used = words
            phrase = f"{name.rpartition('/')[2]} (process {pid}, {_gib(_mib(used))} GiB)"
            found.setdefault(uuid, {})[pid] = phrase
    return found


def _mib(text: str) -> float:
    """Bytes of a number of MiB; 0 for `[N/A]`."""
    try:
        return float(text) * 2**20
    except ValueError:
        return 0.0


def _gpu(gpu: Gpu) -> Finding:
    name = f"GPU {gpu.index}"
    detail = f"{gpu.name}, {_gib(gpu.total - gpu.used)} of {_gib(gpu.total)} GiB free, driver {gpu.driver}"
    if gpu.total and gpu.used / gpu.total > OCCUPIED:
        by = f" by {gpu.users}" if gpu.users else ""
        end = f"kill {gpu.pids} ends what runs there" if gpu.pids else "nvidia-smi shows what runs there"
        advice = f"{end}; export CUDA_VISIBLE_DEVICES=NUMBERS chooses other GPUs"
        return warning(name, f"{detail}; {_gib(gpu.used)} GiB are used{by}", advice)
    detail = f"{detail}, compute capability {gpu.capability}"
    numbers = gpu.capability.split(".")
    capability = tuple(map(int, numbers)) if all(map(str.isdigit, numbers)) else BFLOAT16
    if capability < BUILT:
        advice = f"{REINSTALL} torch --index-url {WHEELS}/cu126, and engine=transformers"
        return warning(name, f"{detail}: too old for vLLM, and for torch built for CUDA 12.8 or later", advice)
    if capability < BFLOAT16:
        detail = f"{detail}: no bfloat16, so model.dtype=auto is float16; no flash attention, so vLLM takes Triton's"
    return ok(name, detail)


def _unseen(present: list[Gpu], report: TorchReport, machine: Machine, needs: Needs) -> Finding:
    """Why torch does not see the GPUs that nvidia-smi lists."""
    there = f"there {'is 1 GPU' if len(present) == 1 else f'are {len(present)} GPUs'}"
    wanted = needs.cuda or needs.gpus
    hidden = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        detail = f"{there}, and CUDA_VISIBLE_DEVICES={hidden!r} hides all"
        return problem("torch and GPUs", detail, "unset CUDA_VISIBLE_DEVICES", wanted)
    plain = report.version.partition("+")[0]
    if not report.cuda and not report.hip:
        detail = f"{there}, and torch {report.version} is built without CUDA"
        advice = f"{REINSTALL} torch=={plain} --index-url {WHEELS}/cu130"
        return problem("torch and GPUs", detail, advice, wanted)
    driver = _driver_cuda(machine)
    if report.cuda and driver and driver[0] < int(report.cuda.partition(".")[0]):
        shown = ".".join(map(str, driver))
        detail = (
            f"the driver {present[0].driver} is for CUDA {shown}, and torch {report.version} for CUDA {report.cuda}"
        )
        older = f", or {REINSTALL} torch=={plain} --index-url {WHEELS}/cu126" if driver[0] == 12 else ""
        advice = f"update the driver: apt install nvidia-driver-580{older}"
        return problem("torch and GPUs", detail, advice, wanted)
    detail = f"{there}, and torch {report.version} sees none"
    return problem("torch and GPUs", detail, "python -c 'import torch; torch.cuda.init()' prints the reason", wanted)


def _driver_cuda(machine: Machine) -> tuple[int, int] | None:
    """The newest version of CUDA that the driver supports."""
    found = DRIVER_CUDA.search(machine.run(["nvidia-smi"], SMI_SECONDS).out)
    return (int(found[1]), int(found[2])) if found else None


def nccl(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether the GPUs can add a tensor together."""
    count = len(torch_report(machine, needs).gpus)
    if count < 2:
        yield not_needed("NCCL", "connects two GPUs or more")
        return
    yield connected(machine, "nccl", count, needs.gpus > 1)


def connected(machine: Machine, backend: str, count: int, needed: bool) -> Finding:
    """A finding about a sum over `count` processes by torch.distributed."""
    ended = machine.probe("collective_probe", NCCL_SECONDS, backend, str(count))
    found = ended.answers()
    name, what = backend.upper(), "GPUs" if backend == "nccl" else "processes"
    if ended.code == 0 and found.get("sum") == count:
        return ok(name, f"{count} {what} add a tensor in {1e3 * found['seconds']:.1f} ms")
    reason = f"no sum within {NCCL_SECONDS:g} s" if ended.code is None else ended.last_error
    advice = "NCCL_DEBUG=INFO grpocli doctor shows more; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 may help"
    return problem(name, f"{count} {what} cannot add a tensor: {reason}", advice, needed)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
